"""The pictures of a plan's results: named runs by time, or kinds by time and by position."""

from pathlib import Path

import numpy as np

from mixer.comparison.report import best_size, finished, has_jumped, mean_between
from mixer.reporting.figure import COLOURS, name_ends, new_figure, save

MARKERS = "osD^v"
TICKS = (1, 2, 5, 15, 60, 300, 900, 3600)  # seconds
MOST_CURVES = 4  # of named runs that one picture shows


def draw(result: dict, output: Path) -> Path | None:
    """None of results that have no picture, as those of retrieval."""
    if any("top1_of_32" in row for row in result["runs"].values()):
        return None
    if "kinds" in result["plan"]:
        return save(figure_of_kinds(result), output) if finished(result["runs"]) else None
    timed = {
        name: one
        for name, one in result["runs"].items()
        if "training_seconds" in one and "seed" not in one
    }
    return save(figure_of_runs(timed), output) if 0 < len(timed) <= MOST_CURVES else None


def figure_of_runs(runs: dict):
    """Training loss against training time."""
    figure = new_figure(figsize=(8, 4.8))
    axes, ends = figure.add_subplot(), {}
    for colour, (name, one) in zip(COLOURS, runs.items(), strict=False):
        end = (one["training_seconds"], one["validation_loss"], colour)
        steps, values = zip(*one["loss"], strict=True)
        times = [step * end[0] / one["steps"] for step in steps]
        axes.plot(times, values, color=colour, linewidth=1)
        axes.plot(*end[:2], "o", color=colour)
        ends[f"{end[1]:.3f} {name}"] = end
    axes.set(xlabel="training time (s)", title="Training loss; dots: validation")
    axes.set_ylabel("loss (nats per token)")
    name_ends(axes, ends)
    return figure


def figure_of_kinds(result: dict):
    figure = new_figure(figsize=(11.5, 5.4))
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    kinds = {row["kind"] for row in finished(result["runs"])}
    # In the order of the plan, so that what plans have in common looks the same.
    planned = dict.fromkeys([*result["plan"]["kinds"], *sorted(kinds)])
    colours = dict(zip([kind for kind in planned if kind in kinds], COLOURS, strict=False))
    draw_times(left, result["runs"], colours)
    draw_positions(right, result["runs"], colours, result["plan"]["seconds"])
    return figure


def ends_of(runs: dict, kind: str, size: str | None = None) -> list[tuple[float, float]]:
    """Seconds and loss at each budget of a kind, or of one size of it: the best rate of a sweep."""
    lowest: dict[float, dict] = {}
    for row in finished(runs, kind):
        best = lowest.get(row["budget"], row)
        if size in (None, row["size"]) and not has_jumped(runs, row):
            if row["validation_loss"] <= best["validation_loss"]:
                lowest[row["budget"]] = row
    return sorted((row["training_seconds"], row["validation_loss"]) for row in lowest.values())


def draw_times(axes, runs: dict, colours: dict[str, str]) -> None:
    """The ends of all runs: thin lines for one size, thick ones for the lowest of a kind, and a bar
    from the lowest to the highest of several seeds.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    rows = sorted(finished(runs), key=lambda row: row["parameters"])
    markers = dict(zip(dict.fromkeys(row["size"] for row in rows), MARKERS, strict=False))
    names, times = {}, []
    for kind, colour in colours.items():
        lowest = ends_of(runs, kind)
        axes.plot(*zip(*lowest, strict=True), color=colour, linewidth=1.8)
        names[kind] = (*lowest[-1], colour)
        for size, marker in markers.items():
            ends = ends_of(runs, kind, size)
            times += [seconds for seconds, _ in ends]
            axes.plot(*zip(*ends, strict=True) if ends else ([], []), color=colour, linewidth=0.8)
            for end in ends:
                style = {"color": colour, "markersize": 6, "zorder": 3}
                axes.plot(
                    *end, marker, markerfacecolor=colour if end in lowest else "white", **style
                )
        for seconds, losses in spreads(runs, kind):
            axes.vlines(seconds, min(losses), max(losses), color=colour, linewidth=5, alpha=0.4)
    axes.set(xscale="log", yscale="log", xlabel="training time on one GPU", title="Loss by time")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_xticks([tick for tick in TICKS if min(times) * 0.8 <= tick <= 1.2 * max(times)])
    axes.xaxis.set_major_formatter(FuncFormatter(time_text))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    if len(markers) > 1:
        for size, marker in markers.items():
            style = {"color": "#555555", "markerfacecolor": "white", "linestyle": ""}
            axes.plot([], [], marker=marker, label=size, **style)
        sizes, title = axes.get_legend_handles_labels(), "size (filled: lowest of its kind)"
        axes.figure.legend(*sizes, loc="outside lower left", ncols=5, title=title)
    name_ends(axes, names)


def spreads(runs: dict, kind: str) -> list[tuple[float, list[float]]]:
    """Of each run of a kind that was repeated: its seconds, and the losses of all its seeds."""
    found: dict[str, list[float]] = {}
    for name, row in runs.items():
        if row.get("kind") == kind and "seed" in row and "validation_loss" in row:
            first = name.removesuffix(f", seed {row['seed']}")
            losses = found.setdefault(first, [runs[first]["validation_loss"]])
            losses.append(row["validation_loss"])
    return [(runs[first]["training_seconds"], losses) for first, losses in found.items()]


def draw_positions(axes, runs: dict, colours: dict[str, str], seconds: float) -> None:
    """The loss by position of each kind's best size after a time."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    names = {}
    for kind, colour in colours.items():
        best = best_size(runs, kind, seconds)
        if not best or not best.get("loss_by_position"):
            continue
        losses = best["loss_by_position"]
        ends = [end for end, _ in losses if (end + 1) & end == 0 or end == losses[-1][0]]
        pairs = list(zip([0, *ends], ends, strict=False))  # positions 0, 1 to 2, 3 to 6 ...
        middle = [np.sqrt((first + 1) * end) for first, end in pairs]
        means = [mean_between(losses, *pair) for pair in pairs]
        axes.plot(middle, means, "-o", color=colour, markersize=3.5)
        names[f"{kind} {best['size']}"] = (middle[-1], means[-1], colour)
    axes.set(xscale="log", xlabel="tokens before", title=f"By position, after {seconds:g} s")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_xticks([1, 16, 256, 2048] if axes.get_xlim()[1] > 1000 else [1, 8, 64, 512])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if names:
        name_ends(axes, names)


def time_text(seconds: float, _position=None) -> str:
    return f"{seconds:g} s" if seconds < 300 else f"{seconds / 60:g} min"
