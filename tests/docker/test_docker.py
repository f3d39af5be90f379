"""What the images and `make setup` install can be installed. No container engine is needed."""

import re
import subprocess
import sys

import pytest
from runs import ROOT

DOCKERFILE = (ROOT / "docker/Dockerfile").read_text().replace("\\\n", " ")
README = (ROOT / "docker/README.md").read_text()
SENT = re.findall(r"^!(.+)$", (ROOT / "docker/Dockerfile.dockerignore").read_text(), re.MULTILINE)


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
    step = re.search(r"^RUN (sed .*?) >.*$", DOCKERFILE, re.MULTILINE)
    return re.findall(r"--extra (\w+)", step[0]), step[1].replace("${TORCH}", torch)


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


def test_what_is_copied_is_sent_to_the_builder():
    for pattern in SENT:
        assert list(ROOT.glob(pattern)), f"{pattern} matches nothing"
    for sources in re.findall(r"^COPY (?!-)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        assert set(sources.split()) <= set(SENT), f"not sent: {sources}"
