"""The pages of the representation test (mixer/analysis/reconstruction.py): a table, a picture, and
all numbers as JSON.
"""

import json
import math
from pathlib import Path

from mixer.analysis.reconstruction import LR, READ
from mixer.common.files import whole_directory
from mixer.reporting.figure import name_curves, new_figure
from mixer.reporting.tables import table, wrapped


def report(result: dict) -> str:
    """The result of the representation test as a Markdown table with notes."""
    rows: dict[tuple, dict] = {}
    for row in result["rows"]:
        own = {"outputs read": row["outputs"], "weights": row["weights"], "layer": row["layer"]}
        own = rows.setdefault(tuple(own.values()), own)
        own[f"Hamming, {row['tokens']} tokens"] = row["hamming"]
        own[f"bits, {row['tokens']}"] = round(row["bits"])
    vocabulary, left = result["vocabulary"], max(row["distance_left"] for row in result["rows"])
    notes = (
        f"{result['label']}: {result['architecture']}, {result['parameters']:,} parameters; "
        f"{result['text']}; a mean over {result['texts']} windows for each number of tokens, "
        "spread evenly. Hamming score: share of positions whose token is not recovered. Bits of "
        f"context: tokens recovered x log2({vocabulary:,}) = {math.log2(vocabulary):.4g} bits. "
        "Read from the layer's outputs of all tokens, or of the last alone; layer 0 is the "
        f"embedding. {result['steps']:,} steps of gradient descent on the L1 distance, rate {LR:g} "
        f"falling to a tenth, from Gaussian noise; at most {left:.1%} of the noise's distance is "
        "left."
    )
    return f"{table(list(rows.values()), keys=3)}\n\n{wrapped(notes)}"


def plot(result: dict, output: Path) -> None:
    """The Hamming score by layer, a colour for each number of tokens. Those of random weights are
    dashed, with hollow marks.
    """
    from matplotlib.ticker import MaxNLocator

    hollow = {"markersize": 9, "markerfacecolor": "none", "linestyle": "--", "linewidth": 0.8}
    marks = {"trained": {"markersize": 4}, "random": hollow}
    figure = new_figure(figsize=(11, 4.6))
    lengths = sorted({row["tokens"] for row in result["rows"]})
    for axes, outputs in zip(figure.subplots(1, 2, sharey=True), READ, strict=True):
        for number, length in enumerate(lengths):
            for weights, mark in marks.items():
                wanted = {"outputs": outputs, "weights": weights, "tokens": length}
                rows = [row for row in result["rows"] if wanted.items() <= row.items()]
                points = [row["layer"] for row in rows], [row["hamming"] for row in rows]
                style = {"marker": "o", "color": f"C{number}", "clip_on": False, **mark}
                axes.plot(*points, label=f"{length} tokens, {weights}", **style)
        tokens = "all tokens" if outputs == "all" else "the last token"
        axes.set_title(f"Read from the output of {tokens}")
        axes.set_ylim(-0.03, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
    figure.axes[0].set_ylabel("Hamming score (share not recovered)")
    name_curves(figure.axes[0])
    figure.savefig(output)


def write(result: dict, directory: Path) -> None:
    """Writes representation.json, .md and .png into `directory`."""
    picture = "![Hamming score by layer](representation.png)"
    text = f"# Representation\n\n{report(result)}\n\n{picture}\n"
    with whole_directory(directory) as stage:
        numbers = json.dumps(result, indent=2) + "\n"
        (stage / "representation.json").write_text(numbers, encoding="utf-8")
        (stage / "representation.md").write_text(text, encoding="utf-8")
        plot(result, stage / "representation.png")
