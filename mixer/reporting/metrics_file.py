"""Reads the metrics that a run wrote, a line of JSON for each logged step."""

import json
import math
from pathlib import Path

from mixer.common.errors import Say, UserError, say_on_stderr


def read_metrics(path: str | Path, say: Say = say_on_stderr) -> list[dict]:
    """The lines of a metrics.jsonl, or of the one in a run directory; see `readable_lines`."""
    path = Path(path) / "metrics.jsonl" if Path(path).is_dir() else Path(path)
    lines = [line for _, line in readable_lines(path, say)] if path.is_file() else []
    if not lines:
        raise UserError(f"{path} has no line that can be read: give a run that has logged a step")
    return lines


def readable_lines(path: Path, say: Say) -> list[tuple[str, dict]]:
    """(text, content) of each line that is an object with an integer "step" and finite numbers.
    `say` tells of others, but not of one at the end, which is being written or was cut short.
    """
    texts = path.read_bytes().split(b"\n")
    pairs = [(text, _content(text)) for text in texts]
    if damaged := sum(bool(text.strip()) and line is None for text, line in pairs[:-1]):
        kind = 'no JSON object with an integer "step" and finite numbers'
        say(f"{path}: left out {damaged} line(s), {kind}")
    return [(text.decode(), line) for text, line in pairs if line is not None]


def _content(text: bytes) -> dict | None:
    """What a line holds, None if it is damaged."""
    try:
        line = json.loads(text.decode())
        numbers = all(value is None or math.isfinite(value) for value in line.values())
        return line if numbers and type(line["step"]) is int else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def series(lines: list[dict], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of `key`, by step; the later line holds where a step was logged twice."""
    values = {line["step"]: float(line[key]) for line in lines if line.get(key) is not None}
    return sorted(values), [values[step] for step in sorted(values)]
