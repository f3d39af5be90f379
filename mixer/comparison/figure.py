"""The pictures of a plan's results: named runs by time, or kinds by time and by position."""

from itertools import pairwise
from pathlib import Path

from mixer.comparison.report import best_size, finished, repeated
from mixer.reporting.figure import COLOURS, log_axis, name_curves, new_figure


def draw(result: dict, output: Path) -> bool:
    """Whether the results have a picture: those of retrieval have none, nor have many runs."""
    runs, figure = result["runs"], None
    timed = {name: row for name, row in runs.items() if "loss" in row and "seed" not in row}
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
        for rows in repeated(runs).values():
            if rows and rows[0]["kind"] == kind:
                losses = [row["validation_loss"] for row in rows]
                bar = {"color": f"C{number}", "linewidth": 5, "alpha": 0.4}
                by_time.vlines(rows[0]["training_seconds"], min(losses), max(losses), **bar)
        if means := (best_size(runs, kind, seconds) or {}).get("loss_by_position"):
            # Of a range of a single position the mean is mostly noise.
            ranges = [(end, loss) for (first, _), (end, loss) in pairwise(means) if end - first > 1]
            by_position.plot(*zip(*ranges, strict=True), **style)
    by_time.set(xlabel="training time on one GPU (s)", title="Lowest loss by time")
    by_position.set(xlabel="tokens before, up to", title=f"By position, after {seconds:g} s")
    by_time.set_ylabel("validation loss (nats per token)")
    log_axis(by_time)
    log_axis(by_position)
    name_curves(by_time)
    return figure
