"""Several models trained beside each other: losses, speed and memory.

    python -m mixer.compare --config configs/demo.yaml --backends dense auto train.steps=200
    python -m mixer.compare --config configs/comparison.yaml --backends cuda dense qwen3 \\
        --seconds 100 --tune lr --seeds 3 optim.warmup_steps=100

Every visible GPU trains models of its own, one at a time, all with the same seed: the same first
weights, and the same data in the same order. Each trains for train.steps, or with --seconds for as
many steps as it was measured to do in that time, so that its learning-rate schedule is complete.

With --tune lr each model first gets short runs at the same learning rates; it trains at the one
that gave it the lowest validation loss, and at the next lower one. With --seeds N the better of
these is repeated; the report has each seed and the mean. --models FILE names models of other sizes
and options, a line for each:

    small mixer: {model.hidden_size: 256}
    small transformer: {model.architecture: qwen3, model.hidden_size: 256}

The output directory gets report.md, report.png and report.json, and what each run printed in
report-runs. The same command goes on with a comparison that was cut short.
"""

import argparse
import shlex
import sys
from pathlib import Path

from mixer.common.errors import UserError, run_command
from mixer.common.files import check_writable
from mixer.common.provenance import commit
from mixer.common.yaml_file import parse_yaml, read_yaml
from mixer.comparison.entrants import entrant, entrants_of
from mixer.comparison.plan import jobs_of
from mixer.comparison.study import Study
from mixer.models.architecture import TRANSFORMERS
from mixer.ops.plain import BACKENDS
from mixer.training.config import load_config


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options, given = parse(arguments)
    plan = plan_of(options, given)
    command = shlex.join(["python", "-m", "mixer.compare", *arguments])
    status = work(plan, {}, [], Path(options.output) / "report", command, options.commit)
    if status:
        sys.exit(status)


def work(
    plan: dict, given: dict, only: list[str], output: Path, command: str, measured: str
) -> int:
    """Does a plan's runs and writes OUTPUT.json, .md and .png; returns the exit status.

    measured: the commit that is measured; by default what git says. Others: see jobs_of.
    """
    file = output.with_name(f"{output.name}.json")
    study = Study(
        file, output.with_name(f"{output.name}-runs"), plan, command, measured or commit()
    )
    jobs = jobs_of(plan, given, only, study.runs)
    check_writable(output.parent)
    return study.work(jobs)


def options_of(overrides: list[str]) -> dict:
    """The options that the command line gives, by section.key."""
    wrong = [text for text in overrides if "=" not in text]
    if wrong:
        raise UserError(f"{' '.join(wrong)}: write overrides as section.key=value")
    given = dict(text.split("=", 1) for text in overrides)
    return {key: parse_yaml(value) if value else "" for key, value in given.items()}


def plan_of(options: argparse.Namespace, given: dict) -> dict:
    """The plan of what the command line asks for; see mixer.comparison.plan."""
    names = options.backends
    models = {name: entrant(name) for name in names}
    others = entrants_of(options.models) if options.models else {}
    if len({*names, *others}) < len(names) + len(others):
        raise UserError(f"{', '.join([*names, *others])}: one is named twice; give each once")
    if not (models | others):
        raise UserError("nothing to compare; give --backends, or --models with a file")
    common = flat(read_yaml(options.config)) | given
    common = {key: value for key, value in common.items() if key not in ("name", "output_dir")}
    settings = [f"{key}={value}" for key, value in given.items() if key == "optim.lr"]
    run = load_config(options.config, settings)
    common = {"logging.log_every": run.logging.log_every} | common
    plan = {"common": common, "seeds": [run.seed + n for n in range(1, options.seeds)]}
    if not options.seconds:
        return plan | {"reference": next(iter(models | others)), "runs": models | others}
    rates = options.rates or [run.optim.lr * factor for factor in (0.5, 1, 2)]
    sweep = {"rates": rates, "sweep_share": options.tune_share} if options.tune else {}
    kinds = {name: {"": own} for name, own in (models | others).items()}
    return plan | {"seconds": options.seconds, "kinds": kinds} | sweep


def flat(config: dict) -> dict:
    """A configuration's options by section.key."""
    found = {}
    for name, section in config.items():
        options = section if isinstance(section, dict) else {"": section}
        found |= {f"{name}.{key}".strip("."): value for key, value in options.items()}
    return found


def parse(arguments: list[str]) -> tuple[argparse.Namespace, dict]:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    help_of_config = "YAML file, see configs/; section.key=value overrides follow"
    add("--config", required=True, help=help_of_config)
    names = f"{', '.join([*BACKENDS, *TRANSFORMERS])}, qwen3:HIDDENxHEADS"
    add("--backends", nargs="+", default=[], help=names)
    add("--models", default="", help="YAML file with models and their options, see above")
    add("--output", default="runs/compare", help="directory of the report and the runs")
    add("--seconds", type=float, help="training time of each model, in place of train.steps")
    add("--tune", choices=["lr"], help="find each model's optim.lr by short runs; needs --seconds")
    add("--rates", nargs="+", default=[], help="to try; default: lr / 2, lr, 2 lr")
    add("--tune-share", type=float, default=0.25, help="steps of a short run, as a share of all")
    add("--seeds", type=int, default=1, help="runs of each model, from other weights and data")
    add("--commit", default="", help="commit that is measured; by default what git says")
    options, overrides = parser.parse_known_args(arguments)
    for name in ("backends", "rates"):  # overrides may follow them
        texts = getattr(options, name)
        overrides += [text for text in texts if "=" in text]
        setattr(options, name, [text for text in texts if "=" not in text])
    check(options)
    return options, options_of(overrides)


def check(options: argparse.Namespace) -> None:
    try:
        options.rates = sorted({float(rate) for rate in options.rates})
    except ValueError:
        raise UserError(f"--rates {' '.join(options.rates)}; allowed: numbers above 0") from None
    if not all(0 < rate < float("inf") for rate in options.rates):
        raise UserError(f"--rates has {options.rates}; allowed: numbers above 0")
    if options.rates and not options.tune:
        raise UserError("--rates is for --tune lr; give that, or leave --rates out")
    if options.tune and not options.seconds:
        raise UserError("--tune lr is for runs of equal time; give --seconds, too")
    if not 0 < options.tune_share <= 1:
        raise UserError(f"--tune-share is {options.tune_share:g}; allowed: above 0, at most 1")
    if options.seeds < 1:
        raise UserError(f"--seeds is {options.seeds}; allowed: 1 or more")
    if options.seconds is not None and not 0 < options.seconds < float("inf"):
        raise UserError(f"--seconds is {options.seconds:g}; allowed: above 0 and finite")


if __name__ == "__main__":
    run_command(main)
