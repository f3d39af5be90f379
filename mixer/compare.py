"""The same training under several mixing backends, or beside a transformer: losses, speed, memory,
and the share of token mixing in a step.

    python -m mixer.compare --config configs/demo.yaml --backends dense auto train.steps=200
    python -m mixer.compare --config configs/comparison.yaml --backends cuda dense qwen3 \\
        --seconds 100 --tune lr --seeds 3 optim.warmup_steps=100

Every run is a training in a process of its own (--processes N: in N, by torchrun), with the same
seed: the same first weights, and the same data in the same order. First each model, and the masked
mixer without its token mixing, is timed in turn, --repeats times: short runs, of which the second
half of the steps counts. Then each trains in full: for train.steps, or with --seconds for as many
steps as it was measured to do in that time, so that its learning-rate schedule is complete.

With --tune lr each model first gets short runs at the same learning rates, and trains at the one
that gave it the lowest validation loss. With --seeds N it trains N times; the report has the mean
and the range. --models FILE names models of other sizes and options, a line for each:

    small mixer: {model.hidden_size: 256}
    small transformer: {model.architecture: qwen3, model.hidden_size: 256}

The output directory gets report.md, report.json, pictures, the metrics of each full run, the runs
themselves under runs/, and what each printed under comparison-logs/. Only a run that has its log
there is ever replaced.
"""

import argparse
import shlex
import sys

from mixer.common.errors import UserError, run_command
from mixer.comparison.compare import CompareOptions, compare
from mixer.models.architecture import TRANSFORMERS
from mixer.models.masked_mixer.plain import BACKENDS


def parse(arguments: list[str] | None) -> CompareOptions:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--config",
        required=True,
        help="YAML file, see configs/; section.key=value overrides follow",
    )
    names = f"{', '.join([*BACKENDS, *TRANSFORMERS])}, qwen3:HIDDENxHEADS"
    add("--backends", nargs="+", default=[], help=names)
    add("--models", default="", help="YAML file with models and their options, see above")
    add("--output", default="runs/compare", help="a new directory")
    add("--repeats", type=int, default=3, help="short runs to time each model")
    add(
        "--timing-steps",
        type=int,
        default=20,
        help="steps that are timed in each of them, after as many others",
    )
    add(
        "--seconds",
        type=float,
        help="training time of each model, in place of train.steps",
    )
    add("--tune", choices=["lr"], help="find each model's optim.lr by short runs")
    add("--rates", nargs="+", default=[], help="to try; default: lr / 2, lr, 2 lr")
    add("--tune-share", type=float, default=0.25, help="steps of a short run, as a share of all")
    add("--seeds", type=int, default=1, help="runs of each model, from other weights and data")
    add(
        "--resume",
        action="store_true",
        help="go on in the output directory: complete runs of these settings are kept",
    )
    add("--processes", type=int, default=1, help="processes (GPUs) of each run, on this machine")
    add("--commit", default="", help="commit that is measured; by default what git says")
    options, overrides = parser.parse_known_args(arguments)
    for name in ("backends", "rates"):  # overrides may follow them
        given = getattr(options, name)
        overrides += [text for text in given if "=" in text]
        setattr(options, name, [text for text in given if "=" not in text])
    try:
        options.rates = [float(rate) for rate in options.rates]
    except ValueError:
        raise UserError(f"--rates {' '.join(options.rates)}; allowed: numbers above 0") from None
    command = shlex.join(["python", "-m", "mixer.compare", *(arguments or sys.argv[1:])])
    return CompareOptions(**vars(options), overrides=overrides, command=command)


def main(arguments: list[str] | None = None) -> None:
    print(compare(parse(arguments)))


if __name__ == "__main__":
    run_command(main)
