"""Loss curves: of one run, of several runs beside each other, and by position in the window."""

import itertools
from collections.abc import Collection
from pathlib import Path

import numpy as np

from mixer.common.errors import UserError
from mixer.reporting.figure import GREY, log_axis, name_curves, new_figure, plain_number, short_name
from mixer.reporting.metrics_file import read_metrics, seconds_of_training, series

MOST_MEANS = 50  # points of a smoothed curve


def plot_training(run_directory: Path, output: Path) -> None:
    """A run's validation loss, and behind it training loss: as logged, and smoothed."""
    lines = read_metrics(run_directory)
    steps, losses = series(lines, "loss")
    if not steps:
        raise UserError(f"{run_directory} has no training loss yet: let the run log a step first")
    figure = new_figure(figsize=(9, 4.8))
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=GREY, alpha=0.3, linewidth=0.8)
    steps, losses = smooth(steps, losses)
    style = {"marker": "o", "markersize": 3} if len(steps) < 20 else {}
    axes.plot(steps, losses, color=GREY, label=f"training {losses[-1]:.3f}", **style)
    steps, losses = series(lines, "validation_loss")
    if steps:
        style = {"linewidth": 2.2, "marker": "o", "markersize": 4}
        axes.plot(steps, losses, label=f"validation {losses[-1]:.3f}", **style)
    axes.xaxis.set_major_formatter(plain_number)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_title(f"{short_name(run_directory.resolve().name)}: loss")
    name_curves(axes)
    figure.savefig(output)


def smooth(steps: list[int], values: list[float]) -> tuple[list[float], list[float]]:
    """Steps and values as means over up to MOST_MEANS stretches of equal numbers of values."""
    stretches = np.array_split(np.arange(len(steps)), min(MOST_MEANS, len(steps)))
    return tuple([float(np.mean(np.take(of, s))) for s in stretches] for of in (steps, values))


def compare_runs(runs: dict[str, list[dict]], output: Path) -> list[dict]:
    """Draws validation loss against training time, and returns the rows of a table of the runs'
    ends. `runs`: name -> metrics.

    Raises UserError for a run that has not been evaluated.
    """
    figure = new_figure(figsize=(8, 4.8))
    axes, rows = figure.add_subplot(), []
    for name, lines in runs.items():
        steps, losses = series(lines, "validation_loss")
        if not steps:
            raise UserError(
                f"{name} has no validation loss yet: let the run train until its first evaluation, "
                "after train.eval_every steps or at its end"
            )
        seconds = seconds_of_training(lines, steps)
        label = f"{losses[-1]:.4f} {short_name(name)}"
        axes.plot(seconds, losses, marker="o", markersize=3.5, label=label)
        row = {"run": name, "steps": steps[-1], "seconds": f"{seconds[-1]:.1f}"}
        rows.append(row | {"validation loss": losses[-1]})
    axes.set_xlim(left=0)
    axes.set(xlabel="training time (s)", ylabel="validation loss (nats per token)")
    axes.set_title("Validation loss by training time")
    name_curves(axes)
    figure.savefig(output)
    return rows


def plot_loss_by_position(
    curves: list[tuple[str, list[float | None]]], output: Path, contexts: Collection[int] = ()
) -> None:
    """`curves`: of each its name and mean nats per position, (context,), None where no target was
    scored. Positions start at 1. `contexts` are marked: those that models were trained with.
    """
    figure = new_figure(figsize=(8, 4.6))
    axes = figure.add_subplot()
    for number, (name, values) in enumerate(curves):
        values = np.array(values, dtype=float)  # None is NaN
        positions, colour = np.arange(1, len(values) + 1), f"C{number}"
        axes.plot(positions, values, color=colour, alpha=0.22, linewidth=0.8)
        centres, means = log_means(positions, values)
        label = f"{means[-1]:.3f} {short_name(name)}"
        axes.plot(centres, means, color=colour, marker="o", markersize=3.5, label=label)
    for context in contexts:
        axes.axvline(context, color="0.4", linestyle=":", label="trained context")
    log_axis(axes)
    axes.set(xlabel="tokens that the prediction can see", ylabel="loss (nats per token)")
    axes.set_title("Loss by position (legend: at the end)")
    name_curves(axes)
    figure.savefig(output)


def log_means(places: np.ndarray, values: np.ndarray) -> tuple[list[float], list[float]]:
    """Centres and means over ranges that widen in proportion to where they are, NaN left out; both
    arrays are (count,).
    """
    edges = np.unique((2 ** np.arange(0, np.log2(len(values) + 1), 0.25)).astype(int) - 1)
    # Of 128 places, the 128th is no range of its own: one place is noise among means of many.
    if len(edges) > 1 and len(values) - edges[-1] < edges[-1] - edges[-2]:
        edges = edges[:-1]
    centres, means = [], []
    for low, high in itertools.pairwise([*edges, len(values)]):
        known = ~np.isnan(values[low:high])
        if known.any():
            place = places[low:high][known]
            centres.append(float(np.sqrt(float(place[0]) * float(place[-1]))))
            means.append(float(values[low:high][known].mean()))
    return centres, means
