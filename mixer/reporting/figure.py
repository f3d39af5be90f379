"""What all pictures share: style, figures with curves, and the curve of the loss by position.

matplotlib is optional, so it is imported where a picture is drawn.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
GREY = "#777777"
PLAIN = "{x:,g}"  # the marks of an axis
Layout = Literal["constrained", "compressed", "tight"]  # of a figure
LONGEST_NAME = 40  # of a curve: of a longer name the end is shown, or it is wrapped
STYLE: dict[Any, object] = {
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "text.parse_math": False,  # names of runs may have a $
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "lines.markersize": 4,
    "figure.dpi": 130,
}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(figsize: tuple[float, float] | None = None, layout: Layout | None = None):
    """A figure in our style, which needs no display and none of pyplot's global state. figsize:
    (width, height) in inches. layout: one of matplotlib's, in place of the style's.
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    matplotlib.rcParams["axes.prop_cycle"] = cycler(color=COLOURS)
    return Figure(figsize=figsize, layout=layout)


@contextmanager
def curves(output: Path, title: str, xlabel: str, ylabel: str) -> Iterator:
    """Yields axes to draw curves on, and saves them; a legend that would cover any goes outside."""
    figure = new_figure(figsize=(8.4, 4.8))
    axes = figure.add_subplot()
    yield axes
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if not axes.get_legend_handles_labels()[0]:
        figure.savefig(output)
        return
    legend = axes.legend(loc="upper right")
    figure.draw_without_rendering()  # places the legend
    box = legend.get_window_extent().padded(6)
    paths = [line.get_path().transformed(line.get_transform()) for line in axes.lines]
    covers_line = any(path.intersects_bbox(box, filled=False) for path in paths)
    covers_point = any(box.count_contains(path.vertices) for path in paths)
    if covers_line or covers_point:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.set_figwidth(figure.get_figwidth() + box.width / figure.dpi)
    figure.savefig(output)


def short_name(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


def log_axis(
    axis,
    base: int = 2,
    factors: tuple[float, ...] = (1, 1.25, 1.5, 1.75),
    ticks: Sequence[float] | None = None,
) -> None:
    """Makes a drawn axis logarithmic, with plain numbers at `ticks`, or at powers of the base; a
    narrow range is marked between them, too.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=base)
    low, high = axis.get_view_interval()
    if ticks is not None:
        axis.set_ticks(ticks)
        axis.set_minor_locator(NullLocator())
    elif high < base**3 * low:
        axis.set_major_locator(LogLocator(base, factors))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_formatter(NullFormatter())


def write_names(axes, names: list[tuple[float, float, str, str]]) -> None:
    """Writes (x, y, name, colour) to the right of their points, one below another, in lines of at
    most LONGEST_NAME characters.
    """
    axes.figure.draw_without_rendering()  # settles the limits
    pixels = axes.figure.dpi / 72  # of a point
    line = 1.2 * 10 * pixels  # of the text
    top = -math.inf  # of the names so far
    heights = [axes.transData.transform((x, y))[1] for x, y, *_ in names]
    for height, (x, y, name, colour) in sorted(zip(heights, names, strict=True)):
        wrapped = textwrap.wrap(name, LONGEST_NAME)
        text_height = max(height, top + line * len(wrapped) / 2)
        top = text_height + line * len(wrapped) / 2
        axes.annotate(
            "\n".join(wrapped),
            (x, y),
            xytext=(8, (text_height - height) / pixels),
            textcoords="offset points",
            color=colour,
            fontsize=10,
            va="center",
            annotation_clip=False,
        )


def plot_loss_by_position(results: list[dict], output: Path) -> None:
    """Draws evaluations' losses by position, from 1, and marks a context shorter than windows."""
    xlabel = "tokens before the predicted one"
    with curves(output, "Loss by position", xlabel, "loss (nats per token)") as axes:
        for number, result in enumerate(results):
            colour = f"C{number}"
            values = np.array(result["loss_by_position"], dtype=float)  # None is NaN
            counts = np.array(result["count_by_position"])
            # With a stride below the window, only a stream's first window has the early positions.
            values[10 * counts < counts.max()] = np.nan
            positions = np.arange(1, len(values) + 1)
            axes.plot(positions, values, color=colour, alpha=0.22, linewidth=0.8)
            centres, means = log_means(positions, values)
            label = f"{short_name(result['label'])}: {means[-1]:.3f} at the end"
            axes.plot(centres, means, "o-", color=colour, label=label)
        for context in {r["context"] for r in results if "loss_second_half" in r}:
            axes.axvline(context, color="0.4", linestyle=":", label="trained context")
        log_axis(axes.xaxis)


def log_means(positions: np.ndarray, values: np.ndarray) -> tuple[list[float], list[float]]:
    """Centres and means over ranges that widen in proportion to where they are, without NaN."""
    count = len(values)
    edges = np.geomspace(1, count + 1, max(2, round(4 * np.log2(count + 1)))).round()
    edges = np.unique(edges.astype(int)) - 1
    centres = []
    means = []
    for low, high in itertools.pairwise(edges):
        is_number = ~np.isnan(values[low:high])
        if is_number.any():
            range_positions = positions[low:high][is_number]
            # The geometric mean of its ends is the middle of a range on a logarithmic axis.
            centres.append(float(np.sqrt(float(range_positions[0]) * float(range_positions[-1]))))
            means.append(float(values[low:high][is_number].mean()))
    return centres, means
