"""The results of a benchmark: the options for them, where they were measured, and their files."""

import argparse
import shlex
import sys
from pathlib import Path

from mixer.common.files import write_text
from mixer.common.provenance import commit, hardware, in_words
from mixer.comparison.study import write_json


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


def file_of(output: str, suffix: str) -> Path:
    """The file of the results with an ending, such as ".json"; `output` may have dots."""
    path = Path(output)
    return path.with_name(path.name + suffix)


def save(result: dict, text: str, output: str) -> None:
    """Writes OUTPUT.json with all numbers, and OUTPUT.md with `text`."""
    write_json(file_of(output, ".json"), result)
    write_text(file_of(output, ".md"), text)
