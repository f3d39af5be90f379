"""Pictures from the metrics of runs.

python -m mixer.report runs/demo                            # runs/demo/training.png
python -m mixer.report runs/one runs/two --output both.png  # validation loss by training time
"""

from pathlib import Path

from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.files import check_writable, whole_file
from mixer.reporting.curves import compare_runs, plot_training
from mixer.reporting.metrics_file import read_metrics
from mixer.reporting.tables import table


def main(arguments=None):
    parser = command_parser("mixer.report", __doc__)
    how = "run directory, or its metrics.jsonl; two or more are compared"
    parser.add_argument("run", nargs="+", help=how)
    how = "picture to write (default: training.png or comparison.png in the first run)"
    parser.add_argument("--output", help=how)
    options = parser.parse_args(arguments)
    first = Path(options.run[0])
    output = Path(options.output or (first if first.is_dir() else first.parent))
    if output.is_dir():
        output /= "training.png" if len(options.run) == 1 else "comparison.png"
    if output.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{output} is no picture; give a name that ends in .png, .svg or .pdf")
    check_writable(output.parent)
    with whole_file(output) as stage:
        if len(options.run) == 1:
            plot_training(first, stage)
        else:
            runs = {run: read_metrics(run) for run in options.run}
            print(table(compare_runs(runs, stage)) + "\n")
    print(output)


if __name__ == "__main__":
    run_command(main)
