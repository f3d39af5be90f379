"""Train backends and transformers with one configuration, and compare losses, speed and memory.

    mixer compare --config configs/demo.yaml --backends dense qwen3 \\
        train.steps=200
    mixer compare --config configs/comparison.yaml --backends cuda dense qwen3 \\
        --seconds 100 --seeds 3 optim.warmup_steps=100

Each visible GPU trains one model at a time, all with the same seed. A model trains for train.steps,
or with --seconds for as many steps as fit into that time, by its measured speed.

The output directory gets report.md, report.png and report.json, and each run's output in
report-runs. The same command resumes an interrupted comparison. For other models, sizes and a sweep
of learning rates, write a plan: see benchmarks/train_plan.py.
"""

import shlex
import sys
from pathlib import Path

from mixer.common.errors import command_parser, run_command
from mixer.comparison.plan import jobs_of
from mixer.comparison.side_by_side import ENTRANTS, plan_of
from mixer.comparison.study import open_study
from mixer.training.config import read_override


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = command_parser("mixer compare", __doc__)
    add = parser.add_argument
    add("--config", required=True, help="YAML file; section.key=value overrides it")
    add("--backends", nargs="+", required=True, metavar="NAME", help=ENTRANTS)
    add("--output", default="runs/compare", help="directory of the report; default: runs/compare")
    add("--seconds", type=float, help="training time of each model, instead of train.steps")
    add("--seeds", type=int, default=1, help="number of seeds per model; default: 1")
    options, overrides = parser.parse_known_args(arguments)
    overrides += [text for text in options.backends if "=" in text]  # they may follow
    plan = plan_of(
        config=options.config,
        names=[text for text in options.backends if "=" not in text],
        seeds=options.seeds,
        seconds=options.seconds,
        overrides=dict(map(read_override, overrides)),
    )
    command = shlex.join(["mixer", "compare", *arguments])
    with open_study(Path(options.output) / "report", plan, command) as study:
        sys.exit(study.work(jobs_of(plan, {}, [], study.runs)))


if __name__ == "__main__":
    run_command(main)
