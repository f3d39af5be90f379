"""The Dockerfile, its README, the Makefile and the package agree. No container engine is needed."""

import fnmatch
import re
import shlex
from pathlib import Path

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


def test_the_image_runs_and_builds_its_kernels_as_a_user_without_rights():
    steps = instructions(DOCKERFILE)
    users = [index for index, (word, _) in enumerate(steps) if word == "USER"]
    assert steps[users[-1]][1] == "mixer"
    kernels = next(i for i, (_, rest) in enumerate(steps) if "mixer.ops.build --arch" in rest)
    assert kernels > users[-1]  # they go into this user's cache


def test_every_documented_build_is_in_the_dockerfiles_table_and_explained():
    known = arguments(DOCKERFILE)
    documented = builds(README)
    versions = {line["CUDA_VERSION"].rpartition(".")[0] for line in documented}
    assert versions == {"12.0", "12.2", "12.6", "13.0"}
    for line in documented:
        assert line.keys() - {"-t"} <= known.keys(), "not an argument of the Dockerfile"
        cuda, torch, index, arches = (
            re.escape((known | line)[name])
            for name in ("CUDA_VERSION", "TORCH_VERSION", "TORCH_INDEX", "ARCH_LIST")
        )
        driver = re.escape(line["CUDA_VERSION"].rpartition(".")[0])
        row = rf"#\s+CUDA {driver}\D.*{cuda} +{torch} +{index} +\"{arches}\""
        assert re.search(row, DOCKERFILE), f"the Dockerfile's table does not have {row}"
    for name in known:
        assert re.search(rf"^\| `{name}` \|", README, re.MULTILINE), f"{name} is not explained"
    (v100,) = [line for line in documented if line["-t"] == "masked-mixer:v100"]
    assert "7.0" in v100["ARCH_LIST"].split()


def test_make_builds_what_is_documented():
    made = builds(MAKEFILE)
    assert {line["-t"] for line in made} == {"masked-mixer:cu130", "masked-mixer:v100"}
    assert all(line in builds(README) for line in made)
    # There is a directory docker, too.
    assert re.search(r"^\.PHONY: docker docker-v100$", MAKEFILE, re.MULTILINE)


def test_the_defaults_are_the_last_line_and_its_torch_the_tested_one():
    known = arguments(DOCKERFILE)
    assert builds(README)[-1] == known | {"-t": "masked-mixer:cu130", "USER_ID": "ID"}
    assert f"torch=={known['TORCH_VERSION']}\n" in CONSTRAINTS


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
