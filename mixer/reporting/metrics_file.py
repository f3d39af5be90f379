"""Reads the metrics that a run wrote, a line of JSON for each logged step."""

import json
from pathlib import Path

from mixer.common.errors import UserError


def read_metrics(path) -> list[dict]:
    """The lines of a metrics.jsonl, or of the one in a run directory. No line is
    skipped: a broken one is an error.

    Raises UserError for a missing or empty file and for a line that is not a JSON object with an
    integer "step", with the number of that line.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"no metrics at {path}: give a run directory that holds metrics.jsonl, or that file"
        )
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path} line {number} is not JSON ({error.msg}): fix or remove that line"
            ) from None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise UserError(
                f'{path} line {number} is not an object with an integer "step": '
                "fix or remove that line"
            )
        lines.append(line)
    if not lines:
        raise UserError(f"{path} is empty: the run has not logged a step yet")
    return lines


def series(lines: list[dict], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of `key`, by step. Where a resumed run logged a step twice, the later line
    holds.
    """
    values = {line["step"]: float(line[key]) for line in lines if line.get(key) is not None}
    steps = sorted(values)
    return steps, [values[step] for step in steps]
