"""Pages about mixing matrices: heat maps, pictures of how far back they reach, and an index with a
table of the quantities of mixer/analysis/matrices.py.
"""

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
}
DISTANCE = (
    "Distance from Toeplitz: how much of a matrix (Frobenius norm) the means of its diagonals "
    "leave out; 0 is one convolution for all positions."
)


def write_pages(read: dict[str, Layers], output: Path) -> Path:
    """Writes a picture of each layer and of how far back all reach, and index.md, into `output`;
    returns the index.

    `read` has the matrices of the checkpoint that is pictured and, before it, of one that its
    change is since, if any.
    """
    checkpoint, layers = list(read.items())[-1]
    name = Path(checkpoint).resolve().name
    with whole_directory(output) as stage:
        for number, matrices in enumerate(layers):
            plot_layer(matrices, f"{name}, layer {number}", stage / f"layer-{number:02d}.png")
        plot_by_lag(layers, stage / "by_lag.png")
        plot_effective_context(layers, stage / "effective_context.png")
        (stage / "index.md").write_text(index(read), encoding="utf-8")
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


def draw_layers(axes, curves: list[np.ndarray], start: int) -> None:
    """For each layer a pale curve, whose x begins at `start`, and a line of its means over ranges
    of x.
    """
    from matplotlib import colormaps

    for number, curve in enumerate(curves):
        colour = colormaps[LAYERS](0.9 * number / max(len(curves) - 1, 1))
        places = np.arange(start, start + len(curve))
        axes.plot(places, curve, color=colour, linewidth=0.7, alpha=0.2)
        style = {"color": colour, "marker": "o", "markersize": 3, "label": f"layer {number}"}
        axes.plot(*log_means(places, curve), **style)


def layer_means(layers: Layers, measure) -> list[np.ndarray]:
    """For each layer the mean of `measure` over its matrices."""
    return [
        np.mean([measure(matrix) for matrix in matrices.values()], axis=0) for matrices in layers
    ]


def plot_by_lag(layers: Layers, output: Path) -> Path:
    figure = new_figure(figsize=(8.6, 4.8))
    axes = figure.add_subplot()
    curves = layer_means(layers, weight_by_lag)
    curves = [curve[: max(1, len(curve) - FEWEST + 1)] for curve in curves]
    draw_layers(axes, curves, start=0)
    axes.set_xscale("symlog", base=2, linthresh=1)  # logarithmic, but with a place for lag 0
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    axes.set_xlabel("lag (tokens back)")
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


def index(read: dict[str, Layers]) -> str:
    """The text of index.md: a table of all matrices of the last checkpoint, then the pictures."""
    (first, earlier), (last, layers) = list(read.items())[0], list(read.items())[-1]
    rows = [
        summary(number, name, matrix, earlier[number][name] if len(read) > 1 else None)
        for number, matrices in enumerate(layers)
        for name, matrix in matrices.items()
    ]
    parts = [f"# Mixing matrices of {last}", table(rows, keys=2), wrapped(DISTANCE)]
    if len(read) > 1:
        parts[0] += f"\n\nChanges (Frobenius norm) are since {first}."
    parts += [f"{wrapped(text)}\n\n![{name}]({name})" for name, text in PAGES.items()]
    parts += [f"![Layer {number}](layer-{number:02d}.png)" for number in range(len(layers))]
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
