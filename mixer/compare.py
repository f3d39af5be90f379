"""Train backends and transformers with one configuration, and compare losses, speed and memory.

    python -m mixer.compare --config configs/demo.yaml --backends dense auto train.steps=200
    python -m mixer.compare --config configs/comparison.yaml --backends cuda dense qwen3 \\
        --seconds 100 --seeds 3 optim.warmup_steps=100

Each visible GPU trains one model at a time, all with the same seed. A model trains for train.steps,
or with --seconds for as many steps as fit into that time, by its measured speed.

The output directory gets report.md, report.png and report.json, and each run's output in
report-runs. The same command resumes an interrupted comparison. For other models, sizes and a sweep
of learning rates, write a plan: see benchmarks/train_plan.py.
"""

import argparse
import shlex
import sys
from pathlib import Path

from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.files import as_path
from mixer.common.hardware import commit
from mixer.common.values import read_yaml
from mixer.comparison.plan import jobs_of
from mixer.comparison.study import open_study
from mixer.models.config import TRANSFORMERS, unread_options
from mixer.ops.plain import BACKENDS
from mixer.training.config import flatten, load_config, read_override

ENTRANTS = ", ".join([*BACKENDS, *TRANSFORMERS, "a config.json of transformers"])


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = command_parser("mixer.compare", __doc__)
    add = parser.add_argument
    add("--config", required=True, help="YAML file; section.key=value overrides it")
    add("--backends", nargs="+", required=True, metavar="NAME", help=ENTRANTS)
    add("--output", default="runs/compare", help="directory of the report; default: runs/compare")
    add("--seconds", type=float, help="training time of each model, instead of train.steps")
    add("--seeds", type=int, default=1, help="number of seeds per model; default: 1")
    options, overrides = parser.parse_known_args(arguments)
    overrides += [text for text in options.backends if "=" in text]  # they may follow
    options.backends = [text for text in options.backends if "=" not in text]
    plan = plan_of(options, dict(map(read_override, overrides)))
    command = shlex.join(["python", "-m", "mixer.compare", *arguments])
    with open_study(Path(options.output) / "report", plan, command, commit()) as study:
        sys.exit(study.work(jobs_of(plan, {}, [], study.runs)))


def plan_of(options: argparse.Namespace, overrides: dict) -> dict:
    """The plan of what the command line asks for; see mixer.comparison.plan. overrides: options of
    the configuration, by section.key.
    """
    names = options.backends
    seeds = options.seeds
    seconds = options.seconds
    if not names or seeds < 1 or not (seconds is None or 0 < seconds < float("inf")):
        problem = f"--backends {' '.join(names)} --seeds {seeds} --seconds {seconds}"
        raise UserError(f"{problem}; allowed: 1 or more of each, and finite seconds above 0")
    if overrides.keys() & {"name", "output_dir"}:
        raise UserError("a comparison takes no name and no output_dir: give --output PATH")
    models = {Path(name).name: entrant(name) for name in names}
    if len(models) < len({*names}):
        raise UserError(f"--backends {' '.join(names)}: two files have one name; give them others")
    run = load_config(options.config, [])
    common = {"logging.log_every": run.logging.log_every}
    common |= dict(flatten(read_yaml(as_path(options.config)))) | overrides
    common = {key: value for key, value in common.items() if key not in ("name", "output_dir")}
    plan = {"common": common, "seeds": [run.seed + n for n in range(1, seeds)]}
    if not seconds:
        return plan | {"reference": next(iter(models)), "runs": models}
    kinds = {name: {"": model_options} for name, model_options in models.items()}
    return plan | {"seconds": seconds, "kinds": kinds}


def entrant(name: str) -> dict:
    """The options of a mixing backend, of a transformer as wide as the configured model, or of the
    model that a file describes.
    """
    if name in BACKENDS:
        of_model = {"architecture": "masked_mixer", "mixing_backend": name}
    elif name in TRANSFORMERS:
        # With an MLP of default width it has about as many parameters as a mixer of its width.
        of_model = {"architecture": name, "intermediate_size": None}
    elif name.endswith(".json"):
        of_model = {"architecture": "auto", "config": name}
    else:
        raise UserError(f"--backends {name}; allowed: {ENTRANTS}; other models need a plan")
    of_model |= unread_options(of_model["architecture"])
    return {f"model.{key}": value for key, value in of_model.items()}


if __name__ == "__main__":
    run_command(main)
