"""Draws the losses of a run, or of several by training time."""

import math
from pathlib import Path

import numpy as np

from mixer.common.errors import UserError
from mixer.common.files import as_path
from mixer.common.values import read_yaml
from mixer.reporting.figure import GREY, PLAIN, curves, short_name
from mixer.reporting.text import SECONDS, series

MOST_MEANS = 50  # points of a smoothed curve


def plot_training(run: Path, lines: list[dict], output: Path, published: str | None = None) -> None:
    """A run's validation loss, and behind it training loss: as logged, and smoothed. lines: its
    metrics. published: a file of other runs' losses, such as benchmarks/published.yaml.
    """
    steps, losses = series(lines, "loss")
    if not steps:
        raise UserError(f"{run} has no training loss yet: let the run log a step first")
    title = f"{short_name(run.resolve().name)}: loss"
    with curves(output, title, "optimizer step", "loss (nats)") as axes:
        centres, means = smooth(steps, losses)
        if len(means) < len(losses):
            label = "training, as logged"
            axes.plot(steps, losses, color=GREY, alpha=0.3, linewidth=0.8, label=label)
        axes.plot(centres, means, "o-", color=GREY, label=f"training: {means[-1]:.3f} at the end")
        evaluated, losses = without_start(*series(lines, "validation_loss"))
        if evaluated:
            label = f"validation: {losses[-1]:.3f} at the end"
            axes.plot(evaluated, losses, "o-", lw=2.2, label=label)
        for name, points in published_losses(published).items() if published else ():
            reached = [point for point in points if point[0] <= steps[-1]] or points[:1]
            last_step, last_loss = reached[-1]
            label = f"{name}: {last_loss:.3f} at step {last_step:,}"
            axes.plot(*zip(*reached, strict=True), "o--", label=label)
        axes.xaxis.set_major_formatter(PLAIN)


def published_losses(file: str) -> dict[str, list[tuple[int, float]]]:
    """(step, loss) of each point of each run in a file. Raises UserError if it has others."""
    try:
        losses = {
            name: [(int(step), float(loss)) for step, loss in sorted(run["losses"].items())]
            for name, run in read_yaml(as_path(file)).items()
        }
        if not all(losses.values()):
            raise ValueError("a run without losses")
        if not all(math.isfinite(loss) for points in losses.values() for _, loss in points):
            raise ValueError("a loss that cannot be drawn")
        return losses
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        form = "NAME: {losses: {4000: 3.9, 8000: 3.6}}"
        raise UserError(f"{file} is not a file of losses by step; allowed: {form}") from None


def without_start(steps: list[int], losses: list[float]) -> tuple[list[int], list[float]]:
    """Without the evaluation before the first step, if there are others: a line from there to the
    next one would be no curve.
    """
    first = 1 if len(steps) > 1 and steps[0] == 0 else 0
    return steps[first:], losses[first:]


def smooth(steps: list[int], values: list[float]) -> tuple[list[float], list[float]]:
    """Steps and values as means over up to MOST_MEANS stretches of nearly as many values."""
    length = 1 + (len(steps) - 1) // MOST_MEANS
    stretches = len(steps) // length
    centres = [float(stretch.mean()) for stretch in np.array_split(steps, stretches)]
    means = [float(stretch.mean()) for stretch in np.array_split(values, stretches)]
    return centres, means


def compare_runs(runs: dict[str, list[dict]], output: Path) -> list[dict]:
    """Draws losses by training time, in bits per byte if tokens differ; returns a table's rows.
    runs: the lines of their metrics, by name.
    """
    rows = []
    drawn = []  # (name, seconds, losses, bits) of each run
    for name, lines in runs.items():
        steps, losses = without_start(*series(lines, "validation_loss"))
        if not steps:
            raise UserError(f"{name} has no validation loss yet: see train.eval_every")
        seconds = np.interp(steps, *training_seconds(lines)).tolist()
        bits = without_start(*series(lines, "validation_bits_per_byte"))[1] or ["-"]
        row = {
            "run": name,
            "steps": steps[-1],
            "seconds": f"{seconds[-1]:{SECONDS}}",
            "validation loss": losses[-1],
            "bits/byte": bits[-1],
        }
        rows.append(row)
        drawn.append((short_name(name), seconds, losses, bits))
    in_bits = tokens_differ(rows) and all(row["bits/byte"] != "-" for row in rows)
    ylabel = f"validation loss ({'bits per byte' if in_bits else 'nats'})"
    with curves(output, "Validation loss by training time", "training time (s)", ylabel) as axes:
        for name, seconds, losses, bits in drawn:
            values = bits if in_bits else losses
            axes.plot(seconds, values, "o-", label=f"{name}: {values[-1]:.4f} at the end")
        axes.set_xlim(left=0)
    return rows


def training_seconds(lines: list[dict]) -> tuple[list[int], list[float]]:
    """The logged steps from 0 on, and the seconds of training up to each: with compilation, without
    evaluation and saving. Where a run has gone on since the line before, a line's seconds and rate
    are of the steps since then; those before it count at the rate of the line before.
    """
    windows = [line for line in lines if line.get("tokens_per_second")]
    steps, tokens = series(windows, "tokens")
    rates = np.array(series(windows, "tokens_per_second")[1])
    seconds = np.array(series(windows, "seconds")[1])
    tokens_before = np.diff([0.0, *tokens]) - rates * seconds
    window_seconds = seconds + tokens_before / np.array([*rates[:1], *rates[:-1]])
    return [0, *steps], np.cumsum([0.0, *window_seconds]).tolist()


def tokens_differ(rows: list[dict]) -> bool:
    """Whether runs had tokens of different sizes, so of another tokenizer or validation text."""
    ratios = {
        round(row["validation loss"] / row["bits/byte"], 3)
        for row in rows
        if row["bits/byte"] != "-"
    }
    return len(ratios) > 1
