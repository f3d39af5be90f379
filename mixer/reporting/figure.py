"""What all pictures share: colours, style, a new figure, names of curves, the axis of steps, and
saving.

matplotlib is imported where a picture is drawn, so that training does not need it.
"""

from pathlib import Path

from mixer.common.errors import UserError

# Okabe and Ito's colours, which colour-blind readers can tell apart; the two oranges and the two
# blues are far from each other.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
GREY = "#777777"
LONGEST_NAME = 40  # of a curve: of a longer name the end is shown
STYLE = {
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "savefig.dpi": 130,
}


def new_figure(**settings):
    """A figure in our style that is drawn without a display and without pyplot's global state."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    figure = Figure(**settings)
    FigureCanvasAgg(figure)
    return figure


def check_picture(path: Path) -> None:
    """Raises UserError where a file's name does not end as a kind of picture that can be saved."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise UserError(
            f"{path} does not end as a picture does; give a name that ends in .png, .svg or .pdf"
        )


def save(figure, path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def name_ends(axes, ends: dict[str, tuple[float, float, str]]) -> None:
    """Writes each curve's name beside the axes, joined by a thin line to where the curve ends, so
    that no legend covers a curve. `ends`: name -> x, y, colour.
    """
    axes.get_xlim(), axes.get_ylim()  # settles the limits
    to_axes = axes.transData + axes.transAxes.inverted()
    height = {name: to_axes.transform(end[:2])[1] for name, end in ends.items()}
    names = sorted(ends, key=height.get)
    points = 72 * axes.figure.get_figheight() * axes.get_position().height
    distance, places = min(16 / points, 1 / len(names)), [height[names[0]]]
    for name in names[1:]:
        places.append(max(height[name], places[-1] + distance))
    # Back down to where the curves end, but not to the numbers of the horizontal axis.
    lift = min((sum(places) - sum(height.values())) / len(names), max(0, places[0] - distance / 2))
    for name, place in zip(names, places, strict=True):
        x, y, colour = ends[name]
        axes.annotate(
            short_name(name),
            (x, y),
            (1.03, place - lift),
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontsize=10,
            fontweight="bold",
            parse_math=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "relpos": (0, 0.5)},
        )


def short_name(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


def short_number(value: float, _position=None) -> str:
    """12000 -> 12k, 3400000 -> 3.4M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def style_steps(axes):
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(short_number))
    axes.set_xlabel("optimizer step")
