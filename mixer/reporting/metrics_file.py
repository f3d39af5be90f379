"""Reads the metrics that a run wrote, a line of JSON for each logged step, and sets its losses
against its training time.
"""

import json
import math
from pathlib import Path
from statistics import median

import numpy as np

from mixer.common.errors import UserError
from mixer.common.say import Say, say_on_stderr

NAMED = 5  # so many damaged lines are named, the others are counted


def read_metrics(path, say: Say = say_on_stderr) -> list[dict]:
    """The lines of a metrics.jsonl, or of the one in a run directory. Damaged lines are left out,
    and `say` names them.

    Raises UserError for a missing file and for one without a line that can be read.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"no metrics at {path}: give a run directory that holds metrics.jsonl, or that file"
        )
    lines = [line for _, line in readable_lines(path, say)]
    if not lines:
        raise UserError(
            f"{path} has no line that can be read: the run has not logged a step yet, or this is "
            "another file"
        )
    return lines


def readable_lines(path: Path, say: Say) -> list[tuple[str, dict]]:
    """(text, content) of each line that is an object with an integer "step" and finite numbers.

    `say` names the others. A line at the end that a kill cut short, or that is being written, is
    left out without a word.
    """
    texts = path.read_bytes().split(b"\n")
    lines = list(map(_content, texts))
    damaged = [
        str(number)
        for number, (text, line) in enumerate(zip(texts[:-1], lines, strict=False), 1)
        if text.strip() and line is None
    ]
    if damaged:
        more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
        say(
            f"{path}: left out line {', '.join(damaged[:NAMED])}{more}: no JSON object with an "
            'integer "step" and finite numbers'
        )
    pairs = zip(texts, lines, strict=True)
    return [(text.decode("utf-8"), line) for text, line in pairs if line is not None]


def _content(text: bytes) -> dict | None:
    """What a line holds, None if it is damaged."""
    try:
        line = json.loads(text.decode("utf-8"))
        numbers = all(value is None or math.isfinite(value) for value in line.values())
        return line if numbers and type(line["step"]) is int else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def series(lines: list[dict], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of `key`, by step. Where a resumed run logged a step twice, the later line
    holds.
    """
    values = {line["step"]: float(line[key]) for line in lines if line.get(key) is not None}
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def validation_by_time(lines: list[dict]) -> dict[float, float]:
    """Validation loss by seconds of training, but for that of the weights before the first step."""
    times = training_times(lines)
    steps, losses = series(lines, "validation_loss")
    at = np.interp(steps, [0, *times], [0.0, *times.values()]).tolist()
    return {time: loss for step, time, loss in zip(steps, at, losses, strict=True) if step}


def at_equal_time(runs: dict) -> tuple[float, dict]:
    """The training time of the shortest run, and each run's validation loss then, on the line
    between its evaluations; None where its first one came later. `runs`: name -> metrics.

    Raises UserError for a run that has not been evaluated.
    """
    curves = {name: validation_by_time(lines) for name, lines in runs.items()}
    for name in (name for name, curve in curves.items() if not curve):
        raise UserError(
            f"{name} has no validation loss yet: let the run train until its first evaluation, "
            "after train.eval_every steps or at its end"
        )
    seconds = min(max(curve) for curve in curves.values())
    return seconds, {
        name: float(np.interp(seconds, list(curve), list(curve.values())))
        if seconds >= min(curve)
        else None
        for name, curve in curves.items()
    }


def training_times(lines: list[dict]) -> dict[int, float]:
    """Seconds of training up to each logged step, without evaluation, saving and start-up."""
    times, passed = {}, -start_up(lines)
    for line in lines:
        if "loss" in line:
            passed += line["seconds"]
            times[line["step"]] = passed
    return times


def start_up(lines: list[dict]) -> float:
    """Seconds of the first calls and of compilation: by how much the first logged steps took longer
    than as many later ones.
    """
    windows = [line for line in lines if "loss" in line]
    steps = [
        window["step"] - before
        for window, before in zip(windows, [0, *(w["step"] for w in windows)], strict=False)
    ]
    if len(windows) < 2:
        return 0.0
    step = median(
        window["seconds"] / count for window, count in zip(windows[1:], steps[1:], strict=True)
    )
    return max(0.0, windows[0]["seconds"] - steps[0] * step)
