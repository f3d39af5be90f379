"""The same training under several mixing backends, or beside a transformer: losses, speed, memory,
and the share of token mixing in a step.

    python -m mixer.compare --config configs/demo.yaml --backends dense panels train.steps=200
    python -m mixer.compare --config configs/comparison.yaml --backends cuda dense llama \\
        --seconds 100 optim.warmup_steps=100

Every run is a training in a process of its own (--processes N: in N, by torchrun), with the same
seed: the same first weights, and the same data in the same order. First each model, and the masked
mixer without its token mixing, is timed in turn, --repeats times: short runs, of which the second
half of the steps counts. Then each trains in full: for train.steps, or with --seconds for as many
steps as it was measured to do in that time, so that its learning-rate schedule is complete.

The output directory gets report.md, report.json, pictures, the metrics of each full run, the runs
themselves under runs/, and what each printed under comparison-logs/. Only a run that has its log
there is ever replaced.
"""

import argparse
import sys

from mixer.common.errors import run_command
from mixer.comparison.compare import CompareOptions, compare
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
    names = f"{', '.join(BACKENDS)}, llama, llama:HIDDENxHEADS"
    add("--backends", nargs="+", required=True, help=names)
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
        default=0,
        help="training time of each model, in place of train.steps",
    )
    add(
        "--resume",
        action="store_true",
        help="go on in the output directory: complete runs of these settings are kept",
    )
    add("--processes", type=int, default=1, help="processes (GPUs) of each run, on this machine")
    add("--commit", default="", help="commit that is measured; by default what git says")
    options, overrides = parser.parse_known_args(arguments)
    overrides += [name for name in options.backends if "=" in name]  # they may follow the backends
    options.backends = [name for name in options.backends if "=" not in name]
    command = " ".join(["python -m mixer.compare", *(arguments or sys.argv[1:])])
    return CompareOptions(**vars(options), overrides=overrides, command=command)


def main(arguments: list[str] | None = None) -> None:
    print(compare(parse(arguments)))


if __name__ == "__main__":
    run_command(main)
