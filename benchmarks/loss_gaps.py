"""How far the losses of runs are from each other: each pair of those in a file of recipe.py.

    python benchmarks/recipe.py benchmarks/plans/recipe_backends_512.yaml --output RESULTS ...
    python benchmarks/loss_gaps.py RESULTS.json --output PATH

What two backends differ by means something only beside what one backend differs by from itself when
nothing but the rounding changes, as it does between train.compile=blocks and no. Writes PATH.json,
PATH.md and PATH.png.
"""

import argparse
import itertools
from pathlib import Path
from types import SimpleNamespace

from saving import file_of, origins, save

from mixer.common.errors import UserError, run_command
from mixer.common.json_file import read_json
from mixer.comparison.result import LARGEST_GAP, LARGEST_GAP_AT_END, gap, losses_of
from mixer.reporting import figure as drawing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", help="the JSON file that recipe.py wrote")
    parser.add_argument("--output", required=True, help="path of the results without ending")
    options = parser.parse_args()
    remedy = "give the JSON file that recipe.py wrote"
    measured = read_json(Path(options.results), remedy, {"runs": dict})
    rows = {name: row for name, row in measured["runs"].items() if "loss" in row}
    if len(rows) < 2:
        raise UserError(
            f"{options.results} has {len(rows)} finished run(s); allowed: two or more; give "
            "recipe.py's command again for the others"
        )
    runs = [SimpleNamespace(name=name, lines=lines_of(row)) for name, row in rows.items()]
    result = {"measured": f"Measured on {origins(measured)}."}
    result["runs"] = {name: ends_of(row) for name, row in rows.items()}
    result["gaps"] = [gap(first, second) for first, second in itertools.combinations(runs, 2)]
    save(result, table(result), options.output)
    curves = {run.name: losses_of(run.lines) for run in runs}
    drawing.save(picture(curves), file_of(options.output, ".png"))
    print(table(result))


def picture(curves: dict[str, dict[int, float]]):
    """Each run's training loss, and below how far it is from the first run's, by step."""
    figure = drawing.new_figure(figsize=(8, 6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    first = next(iter(curves.values()))
    losses, gaps = {}, {}
    for index, (name, curve) in enumerate(curves.items()):
        colour = drawing.COLOURS[index % len(drawing.COLOURS)]
        steps = sorted(curve.keys() & first.keys())
        # The first run is a wide pale line, so that one lying exactly on it still shows both.
        look = {"linewidth": 1.3} if index else {"linewidth": 4.5, "alpha": 0.4}
        above.plot(steps, [curve[step] for step in steps], color=colour, **look)
        gap = [100 * (curve[step] / first[step] - 1) for step in steps]
        below.plot(steps, gap, color=colour, **look)
        losses[name] = (steps[-1], curve[steps[-1]], colour)
        gaps[f"{gap[-1]:+.2f}% {name}"] = (steps[-1], gap[-1], colour)
    above.set(title="Training loss", ylabel="training loss (nats per token)")
    below.set(title=f"Gap to {next(iter(curves))}", ylabel="gap (%)")
    drawing.style_steps(below)
    drawing.name_ends(above, losses)
    drawing.name_ends(below, gaps)
    return figure


def lines_of(row: dict) -> list[dict]:
    """A run's training losses, as its metrics had them."""
    return [{"step": step, "loss": loss} for step, loss in row["loss"]]


def ends_of(row: dict) -> dict:
    """What a run has come to."""
    kept = {name: row[name] for name in ("steps", "tokens")}
    return kept | {"last_loss": row["loss"][-1][1], "validation_loss": row["validation"][-1][1]}


def table(result: dict) -> str:
    text = ["| run | steps | tokens, M | last training loss | validation loss |"]
    text += ["|---|---:|---:|---:|---:|"]
    for name, run in result["runs"].items():
        text.append(
            f"| {name} | {run['steps']:,} | {run['tokens'] / 1e6:.1f} | {run['last_loss']:.4f} | "
            f"{run['validation_loss']:.4f} |"
        )
    text += [
        "",
        "| training losses of | apart at most | at step | on average | means at the end | within "
        "tolerance |",
    ]
    text += ["|---|---:|---:|---:|---:|---|"]
    for found in result["gaps"]:
        text.append(
            f"| {' / '.join(found['models'])} | {found['largest']:.2%} | {found['at_step']} | "
            f"{found['mean']:.2%} | "
            f"{found['of_means_at_end']:.2%} | {'yes' if found['within_tolerance'] else 'no'} |"
        )
    last = result["gaps"][0]["steps_at_end"]
    text += [
        "",
        f"Tolerance: {LARGEST_GAP:.1%} at every logged step, {LARGEST_GAP_AT_END:.1%} of the "
        f"means of the last {last}.",
    ]
    return "\n".join([*text, "", result["measured"]]) + "\n"


if __name__ == "__main__":
    run_command(main)
