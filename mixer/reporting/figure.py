"""What all pictures share: style, a new figure, its legend, and numbers along its axes.

matplotlib is imported where a picture is drawn: training does not need it, and a report is whole
without a picture.
"""

from importlib.util import find_spec

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
    "text.parse_math": False,  # names of runs may have a $
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


def can_draw() -> bool:
    """Whether matplotlib is installed, which is optional."""
    return find_spec("matplotlib") is not None


def new_figure(**settings):
    """A figure in our style that is drawn without a display and without pyplot's global state."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE | {"axes.prop_cycle": matplotlib.cycler(color=COLOURS)})
    figure = Figure(**settings)
    FigureCanvasAgg(figure)
    return figure


def name_curves(axes) -> None:
    """Writes what the curves are beside the axes, where no legend covers one."""
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")


def short_name(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


def plain_number(value: float, _position: int) -> str:
    return f"{value:,g}"


def log_axis(axes) -> None:
    """Makes the horizontal axis logarithmic, of numbers that are drawn already."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    if high < 8 * low:  # powers of 2 alone would be too few marks
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75)))
    axes.xaxis.set_major_formatter(plain_number)
