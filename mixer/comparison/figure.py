"""The pictures of a plan's results: named runs by time, or kinds by time and by position."""

from pathlib import Path

from mixer.comparison.report import best_size, finished
from mixer.reporting.figure import COLOURS, name_curves, new_figure, plain_number

TICKS = (1, 2, 5, 15, 60, 300, 900, 3600)  # seconds
POSITIONS = (1, 4, 16, 64, 256, 1024, 4096)


def draw(result: dict, output: Path) -> bool:
    """Whether the results have a picture: those of retrieval have none, nor have many runs."""
    runs, figure = result["runs"], None
    timed = {name: row for name, row in runs.items() if "training_seconds" in row}
    timed = {name: row for name, row in timed.items() if "seed" not in row}
    if any("top1_of_32" in row for row in runs.values()):
        return False
    if "kinds" in result["plan"] and finished(runs):
        figure = figure_of_kinds(result)
    elif "kinds" not in result["plan"] and 0 < len(timed) <= len(COLOURS):
        figure = figure_of_runs(timed)
    if figure:
        figure.savefig(output)
    return bool(figure)


def figure_of_runs(runs: dict):
    """Training loss against training time."""
    figure = new_figure(figsize=(8, 4.8))
    axes = figure.add_subplot()
    for number, (name, row) in enumerate(runs.items()):
        steps, losses = zip(*row["loss"], strict=True)
        times = [step * row["training_seconds"] / row["steps"] for step in steps]
        end, colour = row["validation_loss"], f"C{number}"
        axes.plot(times, losses, color=colour, linewidth=1, label=f"{end:.3f} {name}")
        axes.plot(row["training_seconds"], end, "o", color=colour)
    axes.set(xlabel="training time (s)", title="Training loss; dots: validation")
    axes.set_ylabel("loss (nats per token)")
    name_curves(axes)
    return figure


def figure_of_kinds(result: dict):
    """The lowest loss of each kind after each time, with a bar for the spread of seeds, and the
    loss by position of its best size.
    """
    runs, seconds = result["runs"], result["plan"]["seconds"]
    figure = new_figure(figsize=(11.5, 5))
    by_time, by_position = figure.subplots(1, 2, width_ratios=(1.35, 1))
    # In the order of the plan, so that what plans have in common looks the same.
    kinds = dict.fromkeys([*result["plan"]["kinds"], *(row["kind"] for row in finished(runs))])
    for number, kind in enumerate(kind for kind in kinds if finished(runs, kind)):
        budgets = sorted({row["budget"] for row in finished(runs, kind)})
        best = [best_size(runs, kind, budget) for budget in budgets]
        ends = [(row["training_seconds"], row["validation_loss"]) for row in best]
        style = {"marker": "o", "markersize": 4, "color": f"C{number}"}
        by_time.plot(*zip(*ends, strict=True), label=kind, **style)
        for end, losses in spreads(runs, kind):
            bar = {"color": f"C{number}", "linewidth": 5, "alpha": 0.4}
            by_time.vlines(end, min(losses), max(losses), **bar)
        if means := (best_size(runs, kind, seconds) or {}).get("loss_by_position"):
            by_position.plot(*zip(*places_of(means), strict=True), **style)
    by_time.set(xlabel="training time on one GPU (s)", title="Lowest loss by time")
    by_position.set(xlabel="tokens before", title=f"By position, after {seconds:g} s")
    by_time.set_ylabel("validation loss (nats per token)")
    set_ticks(by_time, TICKS)
    set_ticks(by_position, POSITIONS)
    name_curves(by_time)
    return figure


def spreads(runs: dict, kind: str) -> list[tuple[float, list[float]]]:
    """Of each run of a kind that was repeated: its seconds, and the losses of all its seeds."""
    found: dict[str, list[float]] = {}
    for name, row in runs.items():
        if row.get("kind") == kind and "seed" in row and "validation_loss" in row:
            first = name.removesuffix(f", seed {row['seed']}")
            found.setdefault(first, [runs[first]["validation_loss"]]).append(row["validation_loss"])
    return [(runs[first]["training_seconds"], losses) for first, losses in found.items()]


def places_of(means: list[list[float]]) -> list[tuple[float, float]]:
    """The middle of each range of positions and its mean loss; see mean_by_position. Of a range of
    a single position, which earlier results have, the mean is mostly noise.
    """
    ranges = zip([0, *(end for end, _ in means)], means, strict=False)
    return [
        (((first + 1) * end) ** 0.5, loss)
        for first, (end, loss) in ranges
        if end == 1 or end - first > 1
    ]


def set_ticks(axes, ticks: tuple[int, ...]) -> None:
    """A logarithmic axis with those of the ticks that are in its range."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    lowest, highest = axes.get_xlim()
    axes.set_xticks([tick for tick in ticks if lowest <= tick <= highest])
    axes.xaxis.set_major_formatter(plain_number)
    axes.xaxis.set_minor_locator(NullLocator())
