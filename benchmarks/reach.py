"""Reach against loss: a picture and a table of the results of benchmarks/plans/reach.yaml.

    python benchmarks/reach.py benchmarks/results/reach_512_h200.json --output PATH

Writes PATH.png and PATH.md. A loss is the mean over seeds; the window of "all lags" is the context.
"""

import re
from pathlib import Path
from statistics import mean

from saving import file_of, markdown, parser_of

from mixer.common.errors import UserError, run_command, say_on_stderr
from mixer.common.files import read_json, write_text
from mixer.reporting.figure import log_axis, new_figure

REMEDY = "name results of reach.yaml"
RUN = re.compile(r"(?P<form>.+), (?:window (?P<window>\d+)|all lags)(?:, seed \d+)?")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    runs = read_json(options.results, REMEDY, required={"runs": {str: dict}})["runs"]
    losses = losses_of(runs)
    draw(losses, file_of(options.output, ".png"))
    source = f"From [{options.results.name}]({options.results.name})."
    text = f"# Reach against loss\n\n{table(losses)}\n\n{source}\n"
    write_text(file_of(options.output, ".md"), text)
    print(text)


def losses_of(runs: dict[str, dict]) -> dict[str, dict[int, list[float]]]:
    """By form and window, the losses of all seeds. Says which runs have none: they diverged."""
    losses: dict[str, dict[int, list[float]]] = {}
    for name, row in runs.items():
        run = RUN.fullmatch(name)
        if run is None:
            raise UserError(f"{name!r} is no run of reach.yaml: {REMEDY}")
        if "validation_loss" not in row:
            say_on_stderr(f"{name} is left out: {row.get('failure', 'it has no validation loss')}")
            continue
        window = int(run["window"] or row["settings"]["model.max_position_embeddings"])
        by_window = losses.setdefault(run["form"], {})
        by_window.setdefault(window, []).append(row["validation_loss"])
    return losses


def table(losses: dict[str, dict[int, list[float]]]) -> str:
    """A row for each form and window: the mean, how it compares with all lags, and each seed."""
    rows = []
    for form, by_window in losses.items():
        all_lags = mean(by_window[max(by_window)])
        for window, seeds in sorted(by_window.items()):
            ratio = f"{mean(seeds) / all_lags:.4f}"
            losses_of_seeds = ", ".join(f"{loss:.4f}" for loss in seeds)
            rows.append([f"{form}, {window}", f"{mean(seeds):.4f}", ratio, losses_of_seeds])
    return markdown(["form, window", "loss", "of all lags", "each seed"], rows)


def draw(losses: dict[str, dict[int, list[float]]], picture: Path) -> None:
    """Each form in a panel of its own, as their losses are far apart: means, and seeds as dots."""
    figure = new_figure(figsize=(3.2 * len(losses), 3.6))
    panels = figure.subplots(1, len(losses), squeeze=False)[0]
    for axes, (form, by_window) in zip(panels, losses.items(), strict=True):
        windows = sorted(by_window)
        axes.plot(windows, [mean(by_window[window]) for window in windows], marker="o")
        for window in windows:
            seeds = by_window[window]
            axes.plot([window] * len(seeds), seeds, ".", color="#777777", zorder=0)
        log_axis(axes.xaxis)
        axes.set(title=form, xlabel="window (tokens)")
    panels[0].set_ylabel("validation loss (nats; dots: seeds)")
    figure.savefig(picture)


if __name__ == "__main__":
    run_command(main)
