"""How far the losses of finished runs are from each other: each pair of them, from their metrics
alone.

    python benchmarks/loss_gaps.py --output PATH --measured "HARDWARE; COMMIT; COMMAND" \\
        NAME=runs/one/metrics.jsonl NAME=...

What two backends differ by means something only beside what one backend differs by from itself when
nothing but the rounding changes, as it does between train.compile=blocks and no. Writes PATH.json,
PATH.md and PATH.png.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))
from mixer.common.errors import UserError, run_command
from mixer.common.files import write_text
from mixer.comparison.result import LARGEST_GAP, LARGEST_GAP_AT_END, gap, losses_of
from mixer.reporting.curves import plot_comparison
from mixer.reporting.metrics_file import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, help="path of the results without ending")
    parser.add_argument(
        "--measured",
        required=True,
        help="what the runs were made on, at which commit, by which command",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="NAME=FILE",
        help="a name and the run's metrics.jsonl; two or more",
    )
    options = parser.parse_args()
    files = dict(run.partition("=")[::2] for run in options.runs)
    wrong = [run for run in options.runs if not Path(run.partition("=")[2]).is_file()]
    if wrong or len(files) < 2:
        given = " ".join(wrong or options.runs)
        raise UserError(
            f"{given} given; allowed: two or more NAME=FILE of different names, each FILE a run's "
            "metrics.jsonl"
        )

    runs = [SimpleNamespace(name=name, lines=read_metrics(file)) for name, file in files.items()]
    result = {"measured": options.measured, "runs": {run.name: ends_of(run.lines) for run in runs}}
    result["gaps"] = [gap(first, second) for first, second in itertools.combinations(runs, 2)]
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output.with_name(output.name + ".json"), json.dumps(result, indent=1) + "\n")
    write_text(output.with_name(output.name + ".md"), table(result))
    plot_comparison(files, output.with_name(output.name + ".png"))
    print(table(result))


def ends_of(lines: list[dict]) -> dict:
    """What a run has come to."""
    losses = losses_of(lines)
    last = [line for line in lines if "validation_loss" in line][-1]
    kept = {name: last[name] for name in ("tokens", "validation_loss", "validation_bits_per_byte")}
    return {"steps": max(losses), "last_loss": losses[max(losses)]} | kept


def table(result: dict) -> str:
    text = ["| run | steps | tokens, M | last training loss | validation loss | bits per byte |"]
    text += ["|---|---:|---:|---:|---:|---:|"]
    for name, run in result["runs"].items():
        text.append(
            f"| {name} | {run['steps']:,} | {run['tokens'] / 1e6:.1f} | {run['last_loss']:.4f} | "
            f"{run['validation_loss']:.4f} | "
            f"{run['validation_bits_per_byte']:.4f} |"
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
    return "\n".join([*text, "", f"Measured on {result['measured']}."]) + "\n"


if __name__ == "__main__":
    run_command(main)
