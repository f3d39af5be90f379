"""Plot the losses of runs.

    mixer curves runs/demo
    mixer curves runs/one runs/two --output both.png
    mixer curves runs/author-toeplitz --published benchmarks/published.yaml

The first line draws runs/demo/training.png. Several runs are compared by training time, with a
table.
"""

from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.files import as_path, check_writable, results_locked, whole_file
from mixer.reporting.curves import compare_runs, plot_training, tokens_differ
from mixer.reporting.text import read_metrics, shown_width, table


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("mixer curves", __doc__)
    parser.add_argument("run", nargs="+", help="directory or metrics.jsonl; several are compared")
    parser.add_argument("--output", help="plot; default: a .png in the first run")
    published_help = "YAML file with published losses, drawn beside those of one run"
    parser.add_argument("--published", metavar="FILE", help=published_help)
    options = parser.parse_args(arguments)
    if options.published and len(options.run) > 1:
        raise UserError("--published goes with one run: give one, or leave it out")
    first = as_path(options.run[0])
    output = as_path(options.output or (first if first.is_dir() else first.parent))
    if output.is_dir() or not options.output:
        output /= "training.png" if len(options.run) == 1 else "comparison.png"
    if output.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{output} is not a picture; give a name that ends in .png, .svg or .pdf")
    # Before the output is checked: a checkpoint given as a run is the wrong run.
    runs = {run: read_metrics(run) for run in options.run}
    check_writable(output.parent)
    with results_locked(output), whole_file(output) as stage:
        if len(options.run) == 1:
            plot_training(first, runs[options.run[0]], stage, options.published)
        else:
            rows = compare_runs(runs, stage)
            print(table(rows, width=shown_width()) + "\n")
            if tokens_differ(rows):
                print("Tokenizers or validation texts differ: compare bits/byte, not the losses.\n")
    print(output)


if __name__ == "__main__":
    run_command(main)
