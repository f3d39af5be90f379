"""Trains the runs of a plan on every visible GPU, one process each, and compares what they reach.

    python benchmarks/train_plan.py PLAN.yaml --output PATH [--only NAME ...] [--seeds N ...] \\
        [section.key=value ...]

Plans are in benchmarks/plans; mixer/comparison/plan.py says what they may have. Overrides of the
command line go before the options of a run.

PATH.json has each run when it ends, and a run that it has is not repeated. SIGTERM or SIGINT stops
the runs, which are saved in PATH-runs, and the exit status is 3: the same command goes on where
they were cut. PATH.md and PATH.png come at the end.
"""

import argparse
import shlex
import sys
from pathlib import Path

from mixer.common.errors import run_command
from mixer.common.hardware import commit
from mixer.compare import options_of
from mixer.comparison.plan import jobs_of
from mixer.comparison.study import Study
from mixer.training.config import read_yaml


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", help="YAML file, see benchmarks/plans")
    parser.add_argument("--output", required=True, help="path of the results without ending")
    names = "runs, kinds or models; default: all"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=names)
    seeds = "repeat the longer runs with these seeds; default: what the plan says"
    parser.add_argument("--seeds", nargs="+", default=[], metavar="N", help=seeds)
    parser.add_argument("--commit", default="", help="commit that is measured; default: git's")
    options, overrides = parser.parse_known_args()
    overrides += [text for text in options.only + options.seeds if "=" in text]  # they may follow
    only = [name for name in options.only if "=" not in name]
    plan, seeds = read_yaml(options.plan), [int(n) for n in options.seeds if "=" not in n]
    plan |= {"seeds": seeds} if seeds else {}
    command = shlex.join(["python", *sys.argv])
    study = Study(Path(options.output), plan, command, options.commit or commit())
    sys.exit(study.work(jobs_of(plan, options_of(overrides), only, study.runs)))


if __name__ == "__main__":
    run_command(main)
