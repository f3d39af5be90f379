"""The Dockerfile, its README, the Makefile and the package agree. No container engine is needed."""

import fnmatch
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
README = (ROOT / "docker" / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
IGNORED = (ROOT / "docker" / "Dockerfile.dockerignore").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def instructions(text: str) -> list[tuple[str, str]]:
    """(FROM, the rest) and so on, with continued lines joined and comments gone."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [
        (word.upper(), rest.strip())
        for word, _, rest in (line.strip().partition(" ") for line in joined)
        if word
    ]


def arguments(text: str) -> dict[str, str]:
    """The build arguments and their defaults."""
    pairs = [rest.partition("=") for word, rest in instructions(text) if word == "ARG"]
    return {name: value.strip('"') for name, _, value in pairs}


def builds() -> dict[str, dict[str, str]]:
    """Of each target of the Makefile that builds an image, its `-t` and build arguments."""
    found = {}
    for target, line in re.findall(r"^(docker\S*):\n\t(.*)$", MAKEFILE, re.MULTILINE):
        words = shlex.split(line)
        pairs = zip(words, words[1:], strict=False)
        given = [word.split("=", 1) for before, word in pairs if before == "--build-arg"]
        found[target] = dict(given) | {"-t": words[words.index("-t") + 1]}
    return found


def test_the_image_runs_and_builds_its_kernels_as_a_user_without_rights():
    steps = instructions(DOCKERFILE)
    users = [index for index, (word, _) in enumerate(steps) if word == "USER"]
    assert steps[users[-1]][1] == "mixer"
    kernels = next(i for i, (_, rest) in enumerate(steps) if "mixer.ops.build --arch" in rest)
    assert kernels > users[-1]  # they go into this user's cache


def test_every_image_of_the_makefile_is_a_row_of_the_readme_and_each_argument_explained():
    known = arguments(DOCKERFILE)
    rows = re.findall(r"^\| `make (\S+)` \|.*$", README, re.MULTILINE)
    assert sorted(rows) == sorted(builds()) == ["docker", "docker-v100"]
    for target, build in builds().items():
        assert build.keys() - {"-t"} <= known.keys(), "not an argument of the Dockerfile"
        torch, cuda, arches = (re.escape(build[key]) for key in ("TORCH", "CUDA", "ARCH_LIST"))
        row = rf"\| `make {target}` \|.* \| {torch}, of CUDA \S+ \| {cuda} \| {arches} \|"
        assert re.search(row, README)
        assert f"make {target} " in README and f"# {build['-t']}\n" in README
    for name in known:
        assert re.search(rf"^\| `{name}` \|", README, re.MULTILINE), f"{name} is not explained"
    # There is a directory docker, too.
    assert re.search(r"^\.PHONY: docker docker-v100$", MAKEFILE, re.MULTILINE)


def test_the_defaults_are_those_of_make_docker_and_its_torch_the_tested_one():
    known = arguments(DOCKERFILE)
    assert builds()["docker"] == {"-t": "masked-mixer:cu130"} | {
        name: value for name, value in known.items() if name != "USER_ID"
    }
    assert f"torch=={known['TORCH']}\n" in CONSTRAINTS


def resolve(*what: str) -> subprocess.CompletedProcess:
    """The packages that uv finds for Python 3.11 on Ubuntu 22.04."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", *what]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_35"]
    return subprocess.run(command, cwd=ROOT, input="ninja", capture_output=True, text=True)


@pytest.fixture(scope="module")
def registry():
    """Skips where no package registry can be reached."""
    done = resolve("-")
    if done.returncode:
        pytest.skip(f"no package registry in reach: {done.stderr.strip().splitlines()[-1]}")


def dockers(torch: str) -> tuple[list[str], str]:
    """What the Dockerfile installs: extras, and a shell command that writes the constraints."""
    (step,) = [rest for word, rest in instructions(DOCKERFILE) if "--requirements" in rest]
    command = re.match(r"(sed .*?) >", step)[1].replace("${TORCH}", torch)
    return re.findall(r"--extra (\w+)", step), command


def makes(torch: str) -> tuple[list[str], str]:
    """The same of `make setup TORCH=...`."""
    words = ["make", "--dry-run", "--always-make", "setup", f"TORCH={torch}"]
    output = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return re.search(r'-e "\.\[(.*)\]"', output)[1].split(","), re.search(r"(sed .*) >", output)[1]


@pytest.mark.parametrize(
    ("installed_by", "torch", "cuda"),
    [(dockers, "2.7.1", "12.6"), (dockers, "2.13.0", "13.0"), (makes, "2.7.1", "12.6")],
)
def test_the_packages_resolve_with_their_pins(installed_by, torch, cuda, registry, tmp_path):
    """Of each image and of a V100's `make setup`, with the CUDA that README says torch is for."""
    extras, command = installed_by(torch)
    constraints = tmp_path / "constraints.txt"
    subprocess.run(f"{command} > {constraints}", shell=True, cwd=ROOT, check=True)
    options = [word for extra in extras for word in ("--extra", extra)]
    done = resolve("pyproject.toml", "--constraint", str(constraints), *options)
    assert done.returncode == 0, done.stderr
    assert f"\ntorch=={torch}\n" in done.stdout
    assert re.search(rf"^nvidia-cuda-runtime(-cu\d+)?=={re.escape(cuda)}\.", done.stdout, re.M)
    assert f" {torch}, of CUDA {cuda} " in README


def test_what_is_copied_exists_and_is_sent_and_what_is_secret_is_not():
    patterns = [line for line in IGNORED.splitlines() if line and not line.startswith("#")]
    assert patterns[0] == "*"
    kept = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for pattern in kept:
        assert list(ROOT.glob(pattern)), f"{pattern} matches nothing"
    copies = [
        rest.split()
        for word, rest in instructions(DOCKERFILE)
        if word == "COPY" and "--from" not in rest
    ]
    for words in copies:
        for source in [word for word in words if not word.startswith("--")][:-1]:
            assert source == "." or source in kept, f"{source} is not sent"
    for path in (".git", ".venv", "data", "runs", ".ssh", ".env"):
        assert not any(fnmatch.fnmatch(path, pattern) for pattern in kept)
