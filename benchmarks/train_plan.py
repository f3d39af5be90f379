"""Train the runs of a plan, one at a time on each visible GPU, and compare their results.

    python benchmarks/train_plan.py PLAN.yaml --output PATH [--only NAME ...] [--seeds N ...] \\
        [section.key=value ...]

Plans are in benchmarks/plans; mixer/comparison/plan.py says what they may have. A run's own
options win over those of the command line.

PATH.json gets each run when it ends; a run that it has is not repeated. SIGTERM or SIGINT stops the
runs and saves them in PATH-runs, with exit status 3. The same command resumes them. At the end come
PATH.md and, except of retrieval, PATH.png.
"""

import shlex
import sys
from pathlib import Path

from saving import parser_of

from mixer.common.errors import run_command
from mixer.common.files import as_path
from mixer.common.values import read_yaml
from mixer.comparison.plan import jobs_of
from mixer.comparison.study import open_study
from mixer.training.config import read_override


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("plan", help="YAML file, see benchmarks/plans")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="runs, kinds or models; default: all",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        default=[],
        metavar="N",
        help="repeat the longer runs with these seeds; default: the plan's",
    )
    options, overrides = parser.parse_known_args()
    # Overrides may follow --only or --seeds, which then take them for values of their own.
    overrides += [text for text in options.only + options.seeds if "=" in text]
    only = [name for name in options.only if "=" not in name]
    seeds = [text for text in options.seeds if "=" not in text]
    plan = read_yaml(as_path(options.plan))
    if seeds:
        plan["seeds"] = [int(text) if text.isdecimal() else text for text in seeds]
    command = shlex.join(["python", *sys.argv])
    settings = dict(map(read_override, overrides))
    with open_study(Path(options.output), plan, command, options.commit) as study:
        sys.exit(study.work(jobs_of(plan, settings, only, study.runs)))


if __name__ == "__main__":
    run_command(main)
