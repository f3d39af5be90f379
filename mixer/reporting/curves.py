"""Loss curves: of one run, of several runs beside each other, and by position in the window."""

import itertools
from pathlib import Path

import numpy as np

from mixer.common.errors import UserError
from mixer.reporting.figure import COLOURS, new_figure, save, short_number, style_steps
from mixer.reporting.metrics_file import read_metrics, series


def plot_training(run_directory: Path, output: Path) -> Path:
    """A run's training and validation loss, and small panels with learning rate and tokens/s."""
    lines = read_metrics(run_directory)
    steps, loss = series(lines, "loss")
    if not steps:
        raise UserError(f"{run_directory} has no training loss yet: let the run log a step first")
    figure = new_figure(figsize=(10, 5.4))
    grid = figure.add_gridspec(2, 2, width_ratios=(2.3, 1))
    axes = figure.add_subplot(grid[:, 0])
    draw_losses(axes, lines, steps, loss)
    name = run_directory.resolve().name
    axes.set_title(f"{name}: loss")
    draw_panel(figure.add_subplot(grid[0, 1]), lines, "lr", "Learning rate")
    draw_panel(
        figure.add_subplot(grid[1, 1]), lines, "tokens_per_second", "Training speed (tokens/s)"
    )
    return save(figure, output)


def draw_losses(axes, lines: list[dict], steps: list[int], loss: list[float]) -> None:
    """Training loss, smoothed where there is much of it, and validation loss."""
    span = len(loss) // 50
    if span > 1:
        axes.plot(steps, loss, color=COLOURS[0], alpha=0.25, linewidth=0.8)
        axes.plot(
            steps,
            smooth(loss, span),
            color=COLOURS[0],
            label=f"training (mean of about {span} lines)",
        )
    else:
        axes.plot(
            steps,
            loss,
            color=COLOURS[0],
            marker="o" if len(steps) < 20 else None,
            markersize=3,
            label="training",
        )
    validation_steps, validation = series(lines, "validation_loss")
    if validation:
        axes.plot(
            validation_steps,
            validation,
            color=COLOURS[1],
            marker="o",
            markersize=4,
            label="validation",
        )
        axes.annotate(
            f"{validation[-1]:.3f}",
            (validation_steps[-1], validation[-1]),
            xytext=(8, 0),  # beside the axes: over them it would hide the training loss
            textcoords="offset points",
            va="center",
            color=COLOURS[1],
            fontweight="bold",
        )
    limit_loss_axis(axes, [loss])
    axes.set_ylabel("loss (nats per token)")
    style_steps(axes)
    axes.legend(loc="upper right")


def draw_panel(axes, lines: list[dict], key: str, title: str) -> None:
    from matplotlib.ticker import FuncFormatter

    steps, values = series(lines, key)
    axes.plot(steps, values, color=COLOURS[2], linewidth=1.0 if len(steps) > 100 else 1.6)
    axes.set_title(title)
    axes.set_ylim(0, 1.15 * max(values) if values and max(values) > 0 else 1)
    if key == "lr":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(short_number))
    style_steps(axes)


def smooth(values: list[float], span: int) -> list[float]:
    """Mean of about `span` values around each one, fewer at the ends but still centred: no lag
    behind a fall.
    """
    values = np.asarray(values, dtype=float)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    index = np.arange(len(values))
    reach = np.minimum(np.minimum(index, len(values) - 1 - index), span // 2)
    return ((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)).tolist()


def limit_loss_axis(axes, curves: list[list[float]]) -> None:
    """Keep a steep start or a single spike from flattening the rest of the curve."""
    values = np.concatenate([np.asarray(curve) for curve in curves if len(curve)])
    values = values[np.isfinite(values)]
    if len(values) > 50:
        low, high = values.min(), np.quantile(values, 0.98)
        axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))


def plot_comparison(runs: dict[str, str | Path], output: Path) -> Path:
    """`plot_gaps` of runs: name -> metrics.jsonl or run directory."""
    metrics = {name: series(read_metrics(path), "loss") for name, path in runs.items()}
    return plot_gaps(
        {name: dict(zip(*found, strict=True)) for name, found in metrics.items()}, output
    )


def plot_gaps(curves: dict[str, dict[int, float]], output: Path) -> Path:
    """`curves`: name -> step -> loss. Loss curves; below, the gap to the first run in percent."""
    if len(curves) < 2:
        raise UserError(
            f"a comparison needs 2 runs or more, got {len(curves)}: {', '.join(curves)}"
        )
    first, *others = curves
    shared = {name: sorted(curves[first].keys() & curves[name].keys()) for name in others}
    for name, steps in shared.items():
        if not steps:
            raise UserError(
                f"runs {first} and {name} share no logged step: "
                "train and log both with the same settings"
            )
    figure = new_figure(figsize=(8, 6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    draw_overlay(above, curves)
    draw_gaps(below, curves, first, shared)
    return save(figure, output)


def draw_overlay(axes, curves: dict[str, dict[float, float]]) -> None:
    """Loss curves beside each other: name -> step or time -> loss."""
    for index, (name, curve) in enumerate(curves.items()):
        # The first run is a wide pale line, so that one lying exactly on it still shows both.
        look = {"linewidth": 4.5, "alpha": 0.4} if index == 0 else {"linewidth": 1.3}
        axes.plot(
            list(curve),
            list(curve.values()),
            color=COLOURS[index % len(COLOURS)],
            label=name,
            **look,
        )
    limit_loss_axis(axes, [list(curve.values()) for curve in curves.values()])
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title("Training loss")
    axes.legend(loc="upper right")


def draw_gaps(
    axes, curves: dict[str, dict[int, float]], first: str, shared: dict[str, list[int]]
) -> None:
    """How far each of the other curves is from the first, at the steps that they share with it."""
    for index, (name, steps) in enumerate(shared.items(), start=1):
        gaps = [
            100 * (curves[name][step] - curves[first][step]) / curves[first][step] for step in steps
        ]
        worst = max(gaps, key=abs)
        label = f"{name}, largest {worst:+.2g} %"
        axes.plot(steps, gaps, color=COLOURS[index % len(COLOURS)], linewidth=0.9, label=label)
        # The axis shows 0.01 % at least: what is closer is drawn as no gap.
        axes.update_datalim([(steps[0], -0.01), (steps[0], 0.01)])
    axes.axhline(0, color="#666666", linewidth=0.8)
    axes.margins(y=0.1 + 0.25 * len(shared))  # room for the legend above the curves
    axes.set_ylabel("gap (%)")
    axes.set_title(f"Relative gap to {first}")
    axes.legend(loc="upper right")
    style_steps(axes)


def plot_loss_by_position(curves: dict[str, list[float | None]], output: Path) -> Path:
    """`curves`: name -> mean nats per position, (context,), None where no target was scored.
    Positions start at 1.
    """
    from matplotlib.ticker import LogLocator

    figure = new_figure(figsize=(8, 4.6))
    axes = figure.add_subplot()
    for colour, (name, values) in zip(itertools.cycle(COLOURS), curves.items(), strict=False):
        values = np.array([np.nan if value is None else value for value in values], dtype=float)
        positions = np.arange(1, len(values) + 1)
        axes.plot(positions, values, color=colour, alpha=0.22, linewidth=0.8)
        axes.plot(
            *log_means(positions, values), color=colour, marker="o", markersize=3.5, label=name
        )
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    if high < 8 * low:  # powers of 2 alone would be too few marks
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens that the prediction can see")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Loss by position in the window")
    axes.legend(loc="upper right")
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
