"""The results of a benchmark: the options for them, where they were measured, their tables and
files.
"""

import argparse
import shlex
import sys
from pathlib import Path

from mixer.common.errors import command_parser
from mixer.common.files import write_json, write_text
from mixer.common.hardware import commit, hardware


def parser_of(description: str, required: bool = True) -> argparse.ArgumentParser:
    """A parser that has --output, and whether it is required, and --commit."""
    parser = command_parser(Path(sys.argv[0]).name, description)
    parser.add_argument("--output", required=required, help="path of the results without ending")
    measured_commit = "commit that is measured; by default what git says"
    parser.add_argument("--commit", default="", help=measured_commit)
    return parser


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def names(text: str) -> list[str]:
    return text.split(",")


def measured_by(options: argparse.Namespace, device: str = "cuda") -> dict:
    """Hardware, commit and command. options: of `parser_of`."""
    return {
        "hardware": hardware(device),
        "commit": options.commit or commit(),
        "command": shlex.join(sys.argv),
    }


def origin(result: dict) -> str:
    """What `measured_by` returns, in words."""
    machine = ", ".join(f"{key} {value}" for key, value in result["hardware"].items())
    return f"{machine}; commit {result['commit'][:10]}; `{result['command']}`"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table, its first column on the left."""
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]])


def file_of(output: str, suffix: str) -> Path:
    """The file of the results with an ending, such as ".json"; `output` may have dots."""
    path = Path(output)
    return path.with_name(path.name + suffix)


def save(result: dict, text: str, output: str) -> None:
    """Writes OUTPUT.json with all numbers, and OUTPUT.md with `text`."""
    write_json(file_of(output, ".json"), result)
    write_text(file_of(output, ".md"), text)
