"""The results of a benchmark: the options for them, where they were measured, and their files."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

from mixer.common.files import write_text
from mixer.common.provenance import commit, hardware, in_words


def add_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Adds --output, and whether it is required, and --commit."""
    parser.add_argument("--output", required=required, help="path of the results without ending")
    parser.add_argument(
        "--commit", default="", help="commit that is measured; by default what git says"
    )


def measured_by(options: argparse.Namespace, device: str = "cuda") -> dict:
    """Hardware, commit and command. options: with `add_options`."""
    where = {"hardware": hardware(device), "commit": options.commit or commit()}
    return where | {"command": shlex.join(sys.argv)}


def origin(result: dict) -> str:
    """What `measured_by` has found, in words."""
    return f"{in_words(result['hardware'])}; commit {result['commit'][:10]}; `{result['command']}`"


def origins(result: dict, runs: list[dict] | None = None) -> str:
    """`origin` of results whose runs (all, or these) were measured at different times."""
    # Files of older plans say once for all runs where they were measured.
    by = [result | run for run in runs or result["runs"].values()]
    devices = ", ".join(dict.fromkeys(run["hardware"]["device"] for run in by))
    torches = ", ".join(dict.fromkeys(run["hardware"]["torch"] for run in by))
    commits = ", ".join(dict.fromkeys(run["commit"][:10] for run in by))
    return f"{devices}, torch {torches}; commit {commits}; `{result['command']}`"


def file_of(output: str, suffix: str) -> Path:
    """The file of the results with an ending, such as ".json"; `output` may have dots."""
    path = Path(output)
    return path.with_name(path.name + suffix)


# A list without objects, which may have lists without any in it.
LIST = re.compile(r"\[(?:[^\[\]{}]|\[[^\[\]{}]*\])*\]")


def write_json(file: Path, result: dict) -> None:
    """Writes results with lists of numbers on one line each."""
    text = json.dumps(result, indent=1)
    write_text(file, LIST.sub(lambda found: re.sub(r"\n *", "", found[0]), text) + "\n")


def save(result: dict, text: str, output: str) -> None:
    """Writes OUTPUT.json with all numbers, and OUTPUT.md with `text`."""
    write_json(file_of(output, ".json"), result)
    write_text(file_of(output, ".md"), text)
