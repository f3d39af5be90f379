"""What all pictures share: colours, style, a new figure, the axis of steps, and saving.

matplotlib is imported where a picture is drawn, so that training does not need it.
"""

from pathlib import Path

from mixer.common.errors import UserError

# Okabe and Ito's colours: told apart by colour-blind readers and in grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
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
