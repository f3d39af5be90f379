"""Pages about mixing matrices: heat maps, a picture of each quantity of mixer/analysis/matrices.py,
and an index with a table.
"""

import itertools
import math
from pathlib import Path

import numpy as np

from mixer.analysis.matrices import (
    SHARE,
    effective_context,
    relative_change,
    toeplitz_distance,
    weight_by_lag,
)
from mixer.common.files import whole_directory
from mixer.reporting.curves import log_means
from mixer.reporting.figure import new_figure, save
from mixer.reporting.tables import table, wrapped

LAYERS = "viridis"  # colours of the layers, first to last
# A lag with fewer weights is left out of the pictures, because its mean is mostly noise.
FEWEST = 8
Layers = list[dict[str, np.ndarray]]  # see mixing_matrices

PAGES = {
    "by_lag.png": f"|W| by lag: the mean over each diagonal of {FEWEST} weights or more. Lag 0 is "
    "the token itself.",
    "effective_context.png": "Effective context: the most recent tokens that hold "
    f"{SHARE:.0%} of a row's |W|, as a share of those that the row can see.",
    "toeplitz.png": "Distance from Toeplitz: how much of a matrix (Frobenius norm) the means of "
    "its diagonals leave out; 0 is one convolution for all positions.",
    "change.png": "Change (Frobenius norm, relative) from each checkpoint to the next, and by lag "
    "from the first to the last.",
}


def write_pages(checkpoints: list[str], read: list[Layers], output: Path) -> Path:
    """Writes a picture of each layer and of each quantity, and index.md, into `output`; returns the
    index.

    `read` has the matrices of each checkpoint. The last checkpoint is pictured, and its change
    since the others.
    """
    layers, names = read[-1], [Path(checkpoint).resolve().name for checkpoint in checkpoints]
    with whole_directory(output) as stage:
        for number, matrices in enumerate(layers):
            plot_layer(matrices, f"{names[-1]}, layer {number}", stage / f"layer-{number:02d}.png")
        plot_by_lag(layers, stage / "by_lag.png")
        plot_effective_context(layers, stage / "effective_context.png")
        plot_toeplitz(layers, stage / "toeplitz.png")
        if len(read) > 1:
            plot_change(read, names, stage / "change.png")
        (stage / "index.md").write_text(index(checkpoints, read), encoding="utf-8")
    return output / "index.md"


def plot_layer(matrices: dict[str, np.ndarray], title: str, output: Path) -> Path:
    """A heat map of each matrix. The colours end at the 99th percentile of |W|, so that a strong
    diagonal does not hide the rest.
    """
    columns = min(len(matrices), 4)
    rows = math.ceil(len(matrices) / columns)
    side = 6.4 if len(matrices) == 1 else 4.2
    figure = new_figure(figsize=(side * columns, side * rows * 0.88))
    cells = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (name, matrix) in zip(cells, matrices.items(), strict=False):
        lower = np.tri(len(matrix), dtype=bool)
        limit = float(np.quantile(np.abs(matrix[lower]), 0.99)) or 1.0
        image = axes.imshow(np.where(lower, matrix, np.nan), cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.set_facecolor("#eeeeee")
        axes.grid(False)
        axes.set_title(f"{title}: {name}")
        axes.set_xlabel("input token")
        axes.set_ylabel("output token")
        figure.colorbar(image, ax=axes, extend="both", shrink=0.8)
    for axes in list(cells)[len(matrices) :]:
        axes.set_axis_off()
    return save(figure, output)


def layer_colours(count: int):
    from matplotlib import colormaps

    return [colormaps[LAYERS](0.9 * number / max(count - 1, 1)) for number in range(count)]


def draw_layers(axes, curves: list[np.ndarray], start: int) -> None:
    """For each layer a pale curve, whose x begins at `start`, and a line of its means over ranges
    of x.
    """
    for number, (curve, colour) in enumerate(zip(curves, layer_colours(len(curves)), strict=True)):
        places = np.arange(start, start + len(curve))
        axes.plot(places, curve, color=colour, linewidth=0.7, alpha=0.2)
        style = {"color": colour, "marker": "o", "markersize": 3, "label": f"layer {number}"}
        axes.plot(*log_means(places, curve), **style)


def style_lags(axes) -> None:
    axes.set_xscale("symlog", base=2, linthresh=1)  # logarithmic, but with a place for lag 0
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    axes.set_xlabel("lag (tokens back)")


def layer_means(layers: Layers, measure) -> list[np.ndarray]:
    """For each layer the mean of `measure` over its matrices."""
    return [
        np.mean([measure(matrix) for matrix in matrices.values()], axis=0) for matrices in layers
    ]


def lag_curves(layers: Layers) -> list[np.ndarray]:
    """For each layer the mean |W| by lag, for lags with FEWEST weights or more."""
    curves = layer_means(layers, weight_by_lag)
    return [curve[: max(1, len(curve) - FEWEST + 1)] for curve in curves]


def plot_by_lag(layers: Layers, output: Path) -> Path:
    figure = new_figure(figsize=(8.6, 4.8))
    axes = figure.add_subplot()
    draw_layers(axes, lag_curves(layers), start=0)
    style_lags(axes)
    axes.set_ylabel("mean |W|")
    axes.set_title("|W| by lag")
    figure.legend(loc="outside right upper")
    return save(figure, output)


def plot_effective_context(layers: Layers, output: Path) -> Path:
    figure = new_figure(figsize=(8.6, 4.8))
    axes = figure.add_subplot()
    curves = layer_means(layers, effective_context)
    positions = np.arange(1, len(curves[0]) + 1)
    draw_layers(axes, [curve / positions for curve in curves], start=1)
    axes.axhline(SHARE, color="#666666", linestyle="--", linewidth=1, label="equal weights")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("tokens that the row can see")
    axes.set_ylabel("share of them in use")
    axes.set_title(f"Effective context: the most recent tokens with {SHARE:.0%} of |W|")
    figure.legend(loc="outside right upper")
    return save(figure, output)


def plot_toeplitz(layers: Layers, output: Path) -> Path:
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(figsize=(8.6, 4.2))
    axes = figure.add_subplot()
    points = [
        (number, toeplitz_distance(matrix))
        for number, matrices in enumerate(layers)
        for matrix in matrices.values()
    ]
    axes.plot(*zip(*points, strict=True), "o", color="#0072B2", label="matrix", clip_on=False)
    context = len(next(iter(layers[0].values())))
    random = math.sqrt(1 - 2 / (context + 1))
    axes.axhline(random, color="#666666", linestyle="--", linewidth=1, label="random weights")
    axes.set_ylim(0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.set_ylabel("distance (share of the norm)")
    axes.set_title("Distance from Toeplitz")
    figure.legend(loc="outside right upper")
    return save(figure, output)


def plot_change(read: list[Layers], names: list[str], output: Path) -> Path:
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(figsize=(12, 4.6))
    left, right = figure.subplots(1, 2)
    changes = [layer_changes(before, after) for before, after in itertools.pairwise(read)]
    for change, (old, new) in zip(changes, itertools.pairwise(names), strict=True):
        left.plot(change, marker="o", markersize=4, label=f"{old} to {new}")
    left.set_ylim(0, 1.2 * max(map(max, changes)) or 1)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlabel("layer")
    left.set_ylabel("relative change")
    left.set_title("Change of the mixing matrices")
    left.legend()
    moved = [
        {name: after[name] - before[name] for name in after}
        for before, after in zip(read[0], read[-1], strict=True)
    ]
    draw_layers(right, lag_curves(moved), start=0)
    style_lags(right)
    right.set_ylabel("mean |change of W|")
    right.set_title(f"By lag, {names[0]} to {names[-1]}")
    right.legend(ncols=2)
    return save(figure, output)


def layer_changes(before: Layers, after: Layers) -> list[float]:
    """For each layer the mean relative change of its matrices."""
    pairs = zip(before, after, strict=True)
    return [
        float(np.mean([relative_change(old[name], new[name]) for name in new]))
        for old, new in pairs
    ]


def index(checkpoints: list[str], read: list[Layers]) -> str:
    """The text of index.md: a table of all matrices of the last checkpoint, then the pictures."""
    rows = [
        summary(number, name, matrix, read[0][number][name] if len(read) > 1 else None)
        for number, matrices in enumerate(read[-1])
        for name, matrix in matrices.items()
    ]
    parts = [f"# Mixing matrices of {checkpoints[-1]}", table(rows, keys=2)]
    if len(read) > 1:
        earlier = ", ".join(checkpoints[:-1])
        parts[0] += f"\n\nChanges are since {earlier}; the table's since the first."
    pages = {name: text for name, text in PAGES.items() if len(read) > 1 or name != "change.png"}
    parts += [f"{wrapped(text)}\n\n![{name}]({name})" for name, text in pages.items()]
    parts += [f"![Layer {number}](layer-{number:02d}.png)" for number in range(len(read[-1]))]
    return "\n\n".join(parts) + "\n"


def summary(layer: int, name: str, matrix: np.ndarray, earlier: np.ndarray | None) -> dict:
    """The row of a matrix in the table; `earlier` is the same matrix of the first checkpoint."""
    size, total = np.abs(matrix), max(np.abs(matrix).sum(), 1e-300)
    row = {
        "layer": layer,
        "matrix": name,
        "mean abs W": float(size[np.tri(len(matrix), dtype=bool)].mean()),
        "share at lag 0": float(np.diag(size).sum() / total),
        "effective context, last row": int(effective_context(matrix)[-1]),
        "distance from Toeplitz": toeplitz_distance(matrix),
    }
    return row if earlier is None else row | {"relative change": relative_change(earlier, matrix)}
