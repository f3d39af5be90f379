"""The mixing matrices of a checkpoint, drawn and measured.

A matrix W is (context, context) and lower-triangular: token i receives W[i, j] of token j, at lag
i - j.
"""

import math
from pathlib import Path

import numpy as np
from torch import nn

from mixer.checkpoints.pretrained import load_masked_mixer
from mixer.common.errors import UserError
from mixer.common.files import results_locked, whole_directory
from mixer.models.masked_mixer.convolution import TriangularConv
from mixer.reporting.figure import PLAIN, curves, log_axis, log_means, new_figure
from mixer.reporting.text import table, wrapped

SHARE = 0.9  # of the last row's |W|, for the effective context
Matrices = dict[str, np.ndarray]  # of a layer, by name

NOTES = (
    f"Effective context: how many of the most recent tokens account for {SHARE:.0%} of |W| in the "
    "last row. The first plot shows the mean |W| of each diagonal; lag 0 is the token itself. "
    "Layers, heads and taps are counted from 1."
)


def write_matrices(checkpoint: Path, output: Path) -> None:
    """Writes the page and its pictures into a directory. Raises UserError if there are none."""
    model = load_masked_mixer(checkpoint)
    rows = []
    curves_by_lag = {}  # by the number of the layer
    pictures = ["by_lag.png"]
    with results_locked(output), whole_directory(output) as stage:
        for number, layer in enumerate(model.model.layers, 1):  # in memory are those of one layer
            if matrices := mixing_matrices(layer):  # attention has none
                pictures.append(f"layer-{number:02d}.png")
                plot_layer(number, matrices, stage / pictures[-1])
                rows += measures(number, matrices)
                curves_by_lag[number] = by_lag(matrices)
        if not rows:
            problem = "has attention in all blocks, and no mixing matrices"
            raise UserError(f"{checkpoint} {problem}: give a model that has some")
        plot_by_lag(curves_by_lag, stage / "by_lag.png")
        sections = [
            f"# Mixing matrices of {checkpoint}",
            table(rows, keys=2),
            wrapped(NOTES) + "\n",
        ]
        page = "\n\n".join(sections) + "".join(f"\n![{name}]({name})\n" for name in pictures)
        (stage / "index.md").write_text(page, encoding="utf-8")


def mixing_matrices(layer: nn.Module) -> Matrices:
    """The matrices of a layer: "W", or such as "W2 head 1 tap 2" where there are several."""
    convs = [module for module in layer.modules() if isinstance(module, TriangularConv)]
    matrices = {}
    for number, conv in enumerate(convs, 1):
        # (heads, taps, context, context)
        weight = conv.mixing_weight().detach().double().cpu().tril().numpy()
        heads, taps = weight.shape[:2]
        for head, tap in np.ndindex(heads, taps):
            name = f"W{number}" if len(convs) > 1 else "W"
            if heads > 1:
                name += f" head {head + 1}"
            if taps > 1:
                name += f" tap {tap + 1}"
            matrices[name] = weight[head, tap]
    return matrices


def effective_context(matrix: np.ndarray) -> int:
    """How many of the most recent tokens, with itself, hold SHARE of the last row's |W|."""
    reached = np.cumsum(np.abs(matrix[-1, ::-1]))
    return 1 + int((reached < SHARE * reached[-1]).sum())


def measures(layer: int, matrices: Matrices) -> list[dict]:
    """The rows of a layer in the table of all."""
    rows = []
    for name, matrix in matrices.items():
        magnitude = np.abs(matrix)
        lower = np.tri(len(matrix), dtype=bool)
        row = {
            "layer": layer,
            "matrix": name,
            "mean abs W": float(magnitude[lower].mean()),
            "share at lag 0": float(np.trace(magnitude) / (magnitude.sum() or 1.0)),
            "effective context, last row": effective_context(matrix),
        }
        rows.append(row)
    return rows


def by_lag(matrices: Matrices) -> np.ndarray:
    """The mean |W| of each diagonal, over all matrices: (context,)."""
    magnitude = np.abs(list(matrices.values())).mean(0)  # (context, context)
    return np.array([np.diagonal(magnitude, -lag).mean() for lag in range(len(magnitude))])


def plot_layer(layer: int, matrices: Matrices, output: Path) -> None:
    """A heat map of each matrix. One scale of colours ends at the 95th percentile of |W|: a strong
    diagonal would hide the rest.
    """
    columns = min(len(matrices), 4)
    rows = math.ceil(len(matrices) / columns)
    side = 6.4 if len(matrices) == 1 else 4.2  # inches of a heat map
    figure = new_figure(figsize=(side * columns, side * rows * 0.88), layout="compressed")
    stack = np.array(list(matrices.values()))  # (matrices, context, context)
    lower = np.tri(stack.shape[-1], dtype=bool)
    limit = float(np.quantile(np.abs(stack[:, lower]), 0.95)) or 1.0
    images = []
    for number, (name, matrix) in enumerate(matrices.items(), 1):
        axes = figure.add_subplot(rows, columns, number, facecolor="#eeeeee")
        image = axes.imshow(np.where(lower, matrix, np.nan), cmap="RdBu_r", vmin=-limit, vmax=limit)
        images.append(image)
        axes.grid(False)
        title = f"Layer {layer}, {name.removeprefix('W ')}"
        axes.set(title=title, xlabel="input token", ylabel="output token")
    figure.colorbar(images[-1], ax=figure.axes, extend="both", aspect=20 * rows)
    figure.savefig(output)


def plot_by_lag(curves_by_lag: dict[int, np.ndarray], output: Path) -> None:
    """`by_lag` of each layer, by its number: each lag pale, means over ranges of lags dark. The
    last lags have one or two weights each, which may lie outside of what is shown.
    """
    from matplotlib import colormaps

    with curves(output, "|W| by lag", "lag (tokens back)", "mean |W|") as axes:
        shades = np.linspace(0, 0.9, len(curves_by_lag))
        drawn = []
        for shade, (number, curve) in zip(shades, curves_by_lag.items(), strict=True):
            colour = colormaps["viridis"](shade)
            axes.plot(np.arange(len(curve)), curve, color=colour, linewidth=0.7, alpha=0.2)
            lags, means = log_means(np.arange(len(curve)), curve)
            axes.plot(lags, means, "o-", color=colour, label=f"layer {number}")
            drawn += [mean for mean in means if mean > 0]
        axes.set_xscale("symlog", base=2, linthresh=1)  # logarithmic, but with a place for lag 0
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(PLAIN)
        if drawn:
            axes.set_ylim(min(drawn) / 1.5, max(drawn) * 1.2)
        log_axis(axes.yaxis, 10, (1, 2, 3, 5))
