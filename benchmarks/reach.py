"""Reach against loss: a picture and a table of the results of benchmarks/plans/reach.yaml.

    python benchmarks/reach.py benchmarks/results/reach_512_h200.json ... --output PATH

Results of several texts or contexts go into one picture, with a panel for each form of mixing.
Writes PATH.png and PATH.md. A loss is the mean over seeds; the window of "all lags" is the context.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from saving import file_of, markdown, parser_of

from mixer.common.errors import UserError, run_command, say_on_stderr
from mixer.common.files import read_json, write_text
from mixer.reporting.figure import GREY, log_axis, new_figure

REMEDY = "name results of reach.yaml"
RUN = re.compile(r"(?P<form>.+), (?:window (?P<window>\d+)|all lags)(?:, seed \d+)?")
HEAD = ["text", "form", "window", "loss", "of all lags", "each seed"]


@dataclass
class Curve:
    """The losses of one form on one text, of all seeds, by window."""

    text: str
    form: str
    context: int
    losses: dict[int, list[float]] = field(default_factory=dict)

    def ratio(self, loss: float) -> float:
        """A loss as a share of that with all lags."""
        return loss / mean(self.losses[self.context])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of the results")
    options = parser.parse_args()
    curves = [curve for file in options.results for curve in curves_of(file)]
    draw(curves, file_of(options.output, ".png"))
    sources = ", ".join(f"[{file.name}]({file.name})" for file in options.results)
    text = f"# Reach against loss\n\n{table(curves)}\n\nFrom {sources}.\n"
    write_text(file_of(options.output, ".md"), text)
    print(text)


def curves_of(file: Path) -> list[Curve]:
    """The curves of a file of results. Says which runs have no loss: they diverged."""
    curves: dict[str, Curve] = {}
    for name, row in read_json(file, REMEDY, required={"runs": {str: dict}})["runs"].items():
        run = RUN.fullmatch(name)
        if run is None:
            raise UserError(f"{name!r} is no run of reach.yaml: {REMEDY}")
        if "validation_loss" not in row:
            say_on_stderr(f"{name} is left out: {row.get('failure', 'it has no validation loss')}")
            continue
        context = row["settings"]["model.max_position_embeddings"]
        is_code = row["settings"]["data.source"] == "builtin"
        text = f"{'code' if is_code else 'books'}, {context}"
        curve = curves.setdefault(run["form"], Curve(text, run["form"], context))
        curve.losses.setdefault(int(run["window"] or context), []).append(row["validation_loss"])
    for curve in curves.values():
        if curve.context not in curve.losses:
            raise UserError(f"{file} has no run of {curve.form!r} with all lags to compare with")
    return list(curves.values())


def table(curves: list[Curve]) -> str:
    """A row for each curve and window: the mean, how it compares with all lags, and each seed."""
    rows = []
    for curve in curves:
        for window, seeds in sorted(curve.losses.items()):
            ratio = f"{curve.ratio(mean(seeds)):.4f}"
            losses = ", ".join(f"{loss:.4f}" for loss in seeds)
            rows.append([curve.text, curve.form, str(window), f"{mean(seeds):.4f}", ratio, losses])
    return markdown(HEAD, rows)


def draw(curves: list[Curve], picture: Path) -> None:
    """A panel for each form, in which its curves on all texts have their losses with all lags in
    common: means, and seeds as dots.
    """
    forms = list(dict.fromkeys(curve.form for curve in curves))
    figure = new_figure(figsize=(3.4 * len(forms), 3.8))
    panels = figure.subplots(1, len(forms), squeeze=False)[0]
    for axes, form in zip(panels, forms, strict=True):
        for curve in curves:
            if curve.form != form:
                continue
            windows = sorted(curve.losses)
            means = [curve.ratio(mean(curve.losses[window])) for window in windows]
            (line,) = axes.plot(windows, means, marker="o", label=curve.text)
            for window in windows:
                seeds = [curve.ratio(loss) for loss in curve.losses[window]]
                axes.plot([window] * len(seeds), seeds, ".", color=line.get_color(), alpha=0.5)
        axes.axhline(1, color=GREY, linewidth=1, zorder=0)
        log_axis(axes.xaxis)
        axes.set(title=form, xlabel="window (tokens)")
        axes.legend()
    panels[0].set_ylabel("loss, of that with all lags (dots: seeds)")
    figure.savefig(picture)


if __name__ == "__main__":
    run_command(main)
