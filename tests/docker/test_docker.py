"""What docker/README.md promises of the image, read from the files: no container engine is
needed.
"""

import fnmatch
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
README = (ROOT / "docker" / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
IGNORED = (ROOT / "docker" / "Dockerfile.dockerignore").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()

# The oldest and newest compute capability of each nvcc, up to the next row's (NVIDIA's release
# notes; nvcc --list-gpu-arch).
COMPILES = {(12, 0): (5.0, 9.0), (12, 8): (5.0, 12.0), (12, 9): (5.0, 12.1), (13, 0): (7.5, 12.1)}
# The GPUs in torch's lines of wheels (PyTorch's CUDA support matrix); code for x.0 runs on all x.y.
WHEELS = {
    "cu126": ("5.0 6.0 7.0 7.5 8.0 8.6 9.0", "2.14"),
    "cu130": ("7.5 8.0 8.6 9.0 10.0 12.0", ""),
}


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


def builds(text: str) -> list[dict[str, str]]:
    """The build arguments, and `-t`, of every `docker build` with a CUDA version in a text."""
    found = []
    for line in text.replace("$(DOCKER_BUILD)", make_variable(text)).splitlines():
        if not (line.lstrip().startswith("docker build") and "CUDA_VERSION" in line):
            continue
        words = shlex.split(
            line.replace("$$", "$").replace("$(id -u)", "ID").replace("${SUDO_UID:-ID}", "ID")
        )
        options = dict(zip(words, words[1:], strict=False))
        assert options["-f"] == "docker/Dockerfile" and words[-1] == ".", line
        pairs = [
            word.split("=", 1)
            for before, word in zip(words, words[1:], strict=False)
            if before == "--build-arg"
        ]
        found.append(dict(pairs) | {"-t": options["-t"]})
    return found


def make_variable(text: str) -> str:
    found = re.search(r"^DOCKER_BUILD = (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def dockerfile_problems(text: str) -> list[str]:
    """What is wrong with a Dockerfile."""
    steps = instructions(text)
    problems = []
    users = [rest for word, rest in steps if word == "USER"]
    if not users or users[-1].partition(":")[0] in ("root", "0"):
        problems.append("runs as root")
    if not any(
        word == "RUN" and re.search(r'test "\$\{USER_ID\}" -ne 0', rest) for word, rest in steps
    ):
        problems.append("takes 0 for USER_ID")
    images = [rest.split()[0] for word, rest in steps if word == "FROM"]
    images += re.findall(r"--from=(\S+)", " ".join(rest for word, rest in steps if word == "COPY"))
    problems += [
        f"{image} has no version"
        for image in images
        if ":" not in image or image.endswith(":latest")
    ]
    for word, rest in steps:
        if word != "RUN":
            continue
        if "apt-get install" in rest and not rest.endswith("rm -rf /var/lib/apt/lists/*"):
            problems.append("leaves apt's lists")
        if "apt-get install" in rest and "--no-install-recommends" not in rest:
            problems.append("installs what apt recommends")
        for command in rest.split("&&"):
            if re.search(r"\b(pip install|uv venv)\b", command) and "--no-cache" not in command:
                problems.append("keeps pip's cache")
    last = max(index for index, (word, _) in enumerate(steps) if word == "USER") if users else -1
    if not any(
        "mixer.ops.build --arch ${ARCH_LIST}" in rest
        for word, rest in steps[last + 1 :]
        if word == "RUN"
    ):
        problems.append("does not build the kernels as its user")
    first = next(index for index, (word, _) in enumerate(steps) if word == "FROM")
    for index, (_, rest) in enumerate(steps):
        seen = (
            steps[first:index] if index > first else steps[:index]
        )  # FROM forgets the arguments before it
        declared = {rest.partition("=")[0] for word, rest in seen if word == "ARG"}
        used = set(re.findall(r"\$\{?([A-Z_]+)", rest)) - {"PATH"}
        problems += [f"{name} is used and not declared" for name in sorted(used - declared)]
    return problems


def line_problems(line: dict[str, str], known: dict[str, str]) -> list[str]:
    """What is wrong with the arguments of one `docker build`."""
    given = {name: value for name, value in line.items() if name != "-t"}
    problems = [f"{name} is no argument of the Dockerfile" for name in given if name not in known]
    values = known | given
    cuda, torch = version(values["CUDA_VERSION"]), version(values["TORCH_VERSION"])
    if len(cuda) != 3:
        problems.append("CUDA_VERSION is no tag")
    oldest, newest = COMPILES[max(row for row in COMPILES if row <= cuda[:2])]
    if values["TORCH_INDEX"] not in WHEELS or values["TORCH_INDEX"][2:4] != str(cuda[0]):
        return [*problems, "torch is of another CUDA"]
    supported, last = WHEELS[values["TORCH_INDEX"]]
    if torch < (2, 7) or (last and torch[:2] > version(last)):
        problems.append("there is no such torch")
    for arch in values["ARCH_LIST"].split():
        if not oldest <= float(arch) <= newest:
            problems.append(f"nvcc {values['CUDA_VERSION']} does not compile for {arch}")
        if not any(
            int(float(arch)) == int(float(has)) and float(has) <= float(arch)
            for has in supported.split()
        ):
            problems.append(f"torch has no kernels for {arch}")
    return problems


def test_the_dockerfile_keeps_its_promises():
    assert dockerfile_problems(DOCKERFILE) == []


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("USER mixer", "USER root", "runs as root"),
        ("USER mixer", "", "runs as root"),
        ('test "${USER_ID}" -ne 0', "true", "takes 0 for USER_ID"),
        (
            "nvidia/cuda:${CUDA_VERSION}-devel-ubuntu22.04",
            "nvidia/cuda:latest",
            "nvidia/cuda:latest has no version",
        ),
        ("astral-sh/uv:0.13.7", "astral-sh/uv", "ghcr.io/astral-sh/uv has no version"),
        ("rm -rf /var/lib/apt/lists/*", "true", "leaves apt's lists"),
        ("--no-install-recommends ", "", "installs what apt recommends"),
        (
            "uv pip install --no-cache --index-url",
            "uv pip install --index-url",
            "keeps pip's cache",
        ),
        ("--arch ${ARCH_LIST}", "--help", "does not build the kernels as its user"),
        ("ARG TORCH_INDEX=cu130\n", "", "TORCH_INDEX is used and not declared"),
    ],
)
def test_a_broken_promise_is_seen(old, new, problem):
    assert old in DOCKERFILE
    assert problem in dockerfile_problems(DOCKERFILE.replace(old, new))


def test_every_documented_build_exists_and_fits():
    known = arguments(DOCKERFILE)
    documented = builds(README)
    assert {line["CUDA_VERSION"].rpartition(".")[0] for line in documented} == {
        "12.0",
        "12.2",
        "12.6",
        "13.0",
    }
    for line in documented:
        assert line_problems(line, known) == []
        row = r"#\s+CUDA {}\D.*{} +{} +{} +\"{}\"".format(
            line["CUDA_VERSION"].rpartition(".")[0],
            *(
                re.escape(line[name])
                for name in ("CUDA_VERSION", "TORCH_VERSION", "TORCH_INDEX", "ARCH_LIST")
            ),
        )
        assert re.search(row, DOCKERFILE), f"the Dockerfile's table does not say {row}"
    for name in known:
        assert re.search(rf"^\| `{name}` \|", README, re.MULTILINE), (
            f"README.md does not explain {name}"
        )
    assert (
        "7.0"
        in next(
            line["ARCH_LIST"] for line in documented if line["-t"] == "masked-mixer:v100"
        ).split()
    )


def test_make_builds_what_is_documented():
    made = builds(MAKEFILE)
    assert {line["-t"] for line in made} == {"masked-mixer:cu130", "masked-mixer:v100"}
    assert all(line in builds(README) for line in made)
    assert re.search(
        r"^\.PHONY: docker docker-v100$", MAKEFILE, re.MULTILINE
    )  # docker is a directory, too


def test_the_defaults_are_the_last_line_and_its_torch_the_tested_one():
    known = arguments(DOCKERFILE)
    assert builds(README)[-1] == known | {"-t": "masked-mixer:cu130", "USER_ID": "ID"}
    assert f"torch=={known['TORCH_VERSION']}\n" in CONSTRAINTS


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"ARCH_LIST": "7.0 9.0"}, "nvcc 13.0.1 does not compile for 7.0"),
        ({"ARCH_LIST": "7.0 9.0"}, "torch has no kernels for 7.0"),
        (
            {"CUDA_VERSION": "12.6.3", "TORCH_INDEX": "cu126", "ARCH_LIST": "10.0"},
            "nvcc 12.6.3 does not compile for 10.0",
        ),
        ({"CUDA_VERSION": "12.2.2"}, "torch is of another CUDA"),
        (
            {"CUDA_VERSION": "12.2.2", "TORCH_INDEX": "cu126", "TORCH_VERSION": "2.15.0"},
            "there is no such torch",
        ),
        ({"CUDA_VERSION": "13.0"}, "CUDA_VERSION is no tag"),
        ({"ARCHS": "9.0"}, "ARCHS is no argument of the Dockerfile"),
    ],
)
def test_a_line_that_cannot_be_built_is_seen(change, problem):
    assert problem in line_problems(change, arguments(DOCKERFILE))


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
