"""The picture of model_sizes.py: loss against training time, and loss by position."""

from pathlib import Path

import numpy as np
from model_sizes_report import best_size, ends_of, fit, kinds_of, sizes_of

from mixer.reporting.figure import COLOURS, name_ends, new_figure, save

MARKERS = "osD^v"
BUDGETS = (1, 2, 5, 15, 60, 300, 900, 3600)  # seconds that may be ticks


def draw(result: dict, output: Path) -> Path:
    figure = new_figure(figsize=(11.5, 5.4))
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    draw_times(left, result["runs"], colours(result))
    draw_positions(right, result["runs"], colours(result), result["plan"]["seconds"])
    return save(figure, output)


def colours(result: dict) -> dict[str, str]:
    """In the order of the plan, so that what plans have in common looks the same."""
    kinds = kinds_of(result["runs"])
    planned = [kind for kind in result["plan"]["kinds"] if kind in kinds]
    return dict(zip(dict.fromkeys(planned + kinds), COLOURS, strict=False))


def draw_times(axes, runs: dict, colours: dict[str, str]) -> None:
    """The ends of all runs, thin lines for one size, and each kind's fit through its lowest."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    markers = dict(zip(sizes_of(runs), MARKERS, strict=False))
    names, all_ends = {}, []
    for kind, colour in colours.items():
        lowest = ends_of(runs, kind)
        for size in sizes_of(runs, kind):
            ends = ends_of(runs, kind, size)
            all_ends += ends
            x, y = [end.seconds for end in ends], [end.loss for end in ends]
            axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.45)
            for end in ends:
                face = colour if end in lowest else "white"
                style = {"color": colour, "markerfacecolor": face, "markersize": 6}
                axes.plot(end.seconds, end.loss, markers[size], zorder=3, **style)
        found = fit(lowest)
        if found is None:
            names[kind] = (lowest[-1].seconds, lowest[-1].loss, colour)
        else:
            span = np.geomspace(lowest[0].seconds, lowest[-1].seconds)
            axes.plot(span, found.at(span), color=colour, linewidth=1.8)
            power = f"{kind} (time^{found.power:.3f})"
            names[power] = (span[-1], found.at(span[-1]), colour)
    axes.set(xscale="log", yscale="log", xlabel="training time on one GPU", title="Loss by time")
    axes.set_ylabel("validation loss (nats per token)")
    times = [end.seconds for end in all_ends]
    axes.set_xticks([b for b in BUDGETS if min(times) * 0.8 <= b <= 1.2 * max(times)])
    axes.xaxis.set_major_formatter(FuncFormatter(time_text))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    for size, marker in markers.items():
        style = {"color": "#555555", "markerfacecolor": "white", "linestyle": ""}
        axes.plot([], [], marker=marker, label=size, **style)
    sizes = axes.get_legend_handles_labels()
    axes.figure.legend(
        *sizes, loc="outside lower left", ncols=5, title="size (filled: lowest of its kind)"
    )
    name_ends(axes, names)


def draw_positions(axes, runs: dict, colours: dict[str, str], seconds: float) -> None:
    """The loss by position of each kind's best size after a time, as means over 1, 2, 4, 8 ...
    positions.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    names = {}
    for kind, colour in colours.items():
        best = best_size(runs, kind, seconds)
        if not best:
            continue
        losses = best["loss_by_position"]
        edges = [0, *(2**n - 1 for n in range(1, 1 + (len(losses)).bit_length()))]
        edges = [*(edge for edge in edges if edge < len(losses)), len(losses)]
        pairs = list(zip(edges, edges[1:], strict=False))
        middle = [np.sqrt((first + 1) * end) for first, end in pairs]
        means = [np.mean(losses[first:end]) for first, end in pairs]
        axes.plot(middle, means, "-o", color=colour, markersize=3.5)
        names[f"{kind} {best['size']}"] = (middle[-1], means[-1], colour)
    axes.set(xscale="log", xlabel="tokens before", title=f"By position, after {seconds:g} s")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_xticks([1, 16, 256, 2048] if axes.get_xlim()[1] > 1000 else [1, 8, 64, 512])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    name_ends(axes, names)


def time_text(seconds: float, _position=None) -> str:
    return f"{seconds:g} s" if seconds < 300 else f"{seconds / 60:g} min"
