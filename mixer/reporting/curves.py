"""Loss curves: of one run, of several runs beside each other, and by position in the window."""

import itertools
from collections.abc import Collection
from pathlib import Path

import numpy as np

from mixer.common.errors import UserError
from mixer.reporting.figure import (
    COLOURS,
    GREY,
    name_ends,
    new_figure,
    save,
    short_name,
    short_number,
    style_steps,
)
from mixer.reporting.metrics_file import at_equal_time, read_metrics, series, validation_by_time

MOST_MEANS = 50  # points of a smoothed curve


def plot_training(run_directory: Path, output: Path) -> Path:
    """A run's validation and training loss, and small panels with learning rate and tokens/s."""
    lines = read_metrics(run_directory)
    if not series(lines, "loss")[0]:
        raise UserError(f"{run_directory} has no training loss yet: let the run log a step first")
    figure = new_figure(figsize=(10, 5.4))
    grid = figure.add_gridspec(2, 2, width_ratios=(2.3, 1))
    axes = figure.add_subplot(grid[:, 0])
    draw_losses(axes, lines)
    axes.set_title(f"{short_name(run_directory.resolve().name)}: loss", parse_math=False)
    draw_panel(figure.add_subplot(grid[0, 1]), lines, "lr", "Learning rate")
    draw_panel(figure.add_subplot(grid[1, 1]), lines, "tokens_per_second", "Tokens per second")
    return save(figure, output)


def draw_losses(axes, lines: list[dict]) -> None:
    """Validation loss, and behind it training loss: as logged, and smoothed."""
    steps, losses = series(lines, "loss")
    axes.plot(steps, losses, color=GREY, alpha=0.3, linewidth=0.8, label="logged")
    steps, losses = smooth(steps, losses)
    style = {"marker": "o", "markersize": 3} if len(steps) < 20 else {}
    axes.plot(steps, losses, color=GREY, label="training", **style)
    ends = {f"training {losses[-1]:.3f}": (steps[-1], losses[-1], GREY)}
    steps, losses = series(lines, "validation_loss")
    if steps:
        style = {"linewidth": 2.2, "marker": "o", "markersize": 4, "label": "validation"}
        axes.plot(steps, losses, color=COLOURS[0], **style)
        ends[f"validation {losses[-1]:.3f}"] = (steps[-1], losses[-1], COLOURS[0])
    axes.set_ylabel("loss (nats per token)")
    style_steps(axes)
    name_ends(axes, ends)


def draw_panel(axes, lines: list[dict], key: str, title: str) -> None:
    from matplotlib.ticker import FuncFormatter

    steps, values = series(lines, key)
    axes.plot(steps, values, color=COLOURS[2], linewidth=1.0 if len(steps) > 100 else 1.6)
    axes.set_title(title)
    axes.set_ylim(0, 1.15 * max(values) if values and max(values) > 0 else 1)
    axes.yaxis.set_major_formatter(FuncFormatter(short_number))
    style_steps(axes)


def smooth(steps: list[int], values: list[float]) -> tuple[list[float], list[float]]:
    """Steps and values as means over up to MOST_MEANS stretches of equal numbers of values."""
    stretches = np.array_split(np.arange(len(steps)), min(MOST_MEANS, len(steps)))
    return tuple([float(np.mean(np.take(of, s))) for s in stretches] for of in (steps, values))


def plot_comparison(runs: dict[str, list[dict]], output: Path) -> Path:
    """Validation loss against training time. `runs`: name -> metrics."""
    seconds, _ = at_equal_time(runs)
    figure = new_figure(figsize=(8, 4.8))
    axes, ends = figure.add_subplot(), {}
    for index, (name, lines) in enumerate(runs.items()):
        curve, colour = validation_by_time(lines), COLOURS[index % len(COLOURS)]
        times, losses = list(curve), list(curve.values())
        # The first run is a wide pale line, so that one lying exactly on it still shows both.
        look = {"linewidth": 1.6} if index else {"linewidth": 5, "alpha": 0.4}
        axes.plot(times, losses, color=colour, marker="o", markersize=3.5, label=name, **look)
        ends[f"{losses[-1]:.4f} {name}"] = (times[-1], losses[-1], colour)
    axes.axvline(seconds, color=GREY, linestyle=":", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"training time (s); dotted: {seconds:.4g} s, where the shortest run ends")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_title("Validation loss by training time")
    name_ends(axes, ends)
    return save(figure, output)


def comparison_rows(runs: dict[str, list[dict]]) -> list[dict]:
    """The rows of a table: each run's validation loss at its end, and at equal time."""
    seconds, at = at_equal_time(runs)
    rows = []
    for name, lines in runs.items():
        time, loss = list(validation_by_time(lines).items())[-1]
        row = {"run": name, "steps": series(lines, "loss")[0][-1], "seconds": f"{time:.1f}"}
        row["validation loss"] = loss
        rows.append(row | {f"at {seconds:.1f} s": "-" if at[name] is None else at[name]})
    return rows


def plot_loss_by_position(
    curves: dict[str, list[float | None]], output: Path, contexts: Collection[int] = ()
) -> Path:
    """`curves`: name -> mean nats per position, (context,), None where no target was scored.
    Positions start at 1. `contexts` are marked: those that models were trained with.
    """
    from matplotlib.ticker import LogLocator

    figure = new_figure(figsize=(8, 4.6))
    axes = figure.add_subplot()
    ends = {}
    for colour, (name, values) in zip(itertools.cycle(COLOURS), curves.items(), strict=False):
        values = np.array([np.nan if value is None else value for value in values], dtype=float)
        positions = np.arange(1, len(values) + 1)
        axes.plot(positions, values, color=colour, alpha=0.22, linewidth=0.8)
        centres, means = log_means(positions, values)
        axes.plot(centres, means, color=colour, marker="o", markersize=3.5, label=name)
        ends[name] = (centres[-1], means[-1], colour)
    for context in contexts:
        axes.axvline(context, color="0.4", linestyle=":", linewidth=1)
        axes.annotate(
            "trained context", (context, 1), xycoords=("data", "axes fraction"), xytext=(-4, -4),
            textcoords="offset points", rotation=90, ha="right", va="top", color="0.4", fontsize=8,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    if high < 8 * low:  # powers of 2 alone would be too few marks
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens that the prediction can see")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Loss by position in the window")
    name_ends(axes, ends)
    return save(figure, output)


def log_means(places: np.ndarray, values: np.ndarray) -> tuple[list[float], list[float]]:
    """Centres and means over ranges that widen in proportion to where they are, NaN left out; both
    arrays are (count,).
    """
    centres, means = [], []
    for low, high in log_bins(len(values)):
        known = ~np.isnan(values[low:high])
        if known.any():
            place = places[low:high][known]
            centres.append(float(np.sqrt(float(place[0]) * float(place[-1]))))
            means.append(float(values[low:high][known].mean()))
    return centres, means


def log_bins(count: int) -> list[tuple[int, int]]:
    """Half-open ranges over 0..count whose widths grow in proportion to where they are."""
    edges = [0]
    while edges[-1] < count:
        edges.append(min(count, max(edges[-1] + 1, round((edges[-1] + 1) * 2**0.25))))
    return list(itertools.pairwise(edges))
