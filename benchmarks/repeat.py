"""Runs the benchmarks that need a GPU, each on one of its own; some need all that there are.

    python benchmarks/repeat.py --list
    python benchmarks/repeat.py --output FOLDER [NAME ...] [--seconds N] \\
        --texts FILES --validation-texts OTHER_FILES

benchmarks/plans/all.yaml says what each one runs, on how many GPUs and for how long. They begin in
its order, or in that of the names given, as soon as enough GPUs are free; with --seconds none is
begun that would end too late. The results are FOLDER/NAME_GPU.json and .md, and what a command
prints is FOLDER/logs/NAME.log. A benchmark that has ended well in FOLDER is not run again. One that
was cut is, and goes on where it was if its script can.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from mixer.common.errors import UserError, run_command
from mixer.common.provenance import commit, hardware
from mixer.common.yaml_file import read_yaml

DONE = "has ended well before"
PLAN = Path(__file__).parent / "plans" / "all.yaml"
ENDING = 60.0  # seconds kept free for a command that is told how long it may work


@dataclass
class Benchmark:
    name: str
    command: str  # of bash, with {output} and other places to fill
    seconds: float  # that it needs to be begun
    all_gpus: bool = False


@dataclass
class Running:
    benchmark: Benchmark
    process: subprocess.Popen
    gpus: list[str]
    began: float


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it runs ends, too
    benchmarks = chosen(options.plan, options.names)
    if options.list:
        for one in benchmarks:
            gpus = "all GPUs" if one.all_gpus else "one GPU"
            print(f"{one.name}: {gpus}, {one.seconds:.0f} s\n    {one.command}")
        return
    if not options.output:
        raise UserError("give --output FOLDER for the results")
    if not run_all(benchmarks, options):
        sys.exit(1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="some of --list; default: all")
    parser.add_argument("--list", action="store_true", help="say what each runs, and run nothing")
    parser.add_argument("--output", help="folder of the results, such as benchmarks/results")
    parser.add_argument("--texts", default="books/train", help="as data.path")
    parser.add_argument("--validation-texts", default="books/validation", help="other texts")
    parser.add_argument("--seconds", type=float, default=1e9, help="how long all may take")
    parser.add_argument("--commit", default="", help="commit that is measured; default: git's")
    parser.add_argument("--plan", default=str(PLAN), help="YAML file; default: plans/all.yaml")
    return parser.parse_args()


def chosen(plan: str, names: list[str]) -> list[Benchmark]:
    """The plan's benchmarks with these names, in their order; all for no name."""
    rows = read_yaml(plan)
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise UserError(f"no benchmark is called {', '.join(unknown)}; allowed: {', '.join(rows)}")
    return [Benchmark(name, **rows[name]) for name in names or rows]


def run_all(benchmarks: list[Benchmark], options: argparse.Namespace) -> bool:
    """Whether each has ended well, now or earlier."""
    deadline = time.monotonic() + options.seconds
    waiting, running, good = list(benchmarks), [], True
    every = visible_gpus()
    free = list(every)
    try:
        while waiting or running:
            while waiting and (refusal := refused(waiting[0], deadline, options)):
                good &= refusal == DONE
                print(f"{waiting.pop(0).name}: {refusal}", flush=True)
            needed = len(every) if waiting and waiting[0].all_gpus else 1
            if waiting and needed <= len(free):
                one = waiting.pop(0)
                own, free = free[:needed], free[needed:]
                print(f"{one.name}: begins on GPU {', '.join(own) or 'none'}", flush=True)
                running.append(started(one, own, every, deadline, options))
                continue
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                free += one.gpus
                good &= ended(one, options)
            time.sleep(0.2)
    finally:
        for one in running:
            os.killpg(one.process.pid, signal.SIGTERM)
    return good


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; one without a name where there is none."""
    every = [str(number) for number in range(torch.cuda.device_count())]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given and every else every or [""]


def refused(one: Benchmark, deadline: float, options: argparse.Namespace) -> str:
    """Why it is not begun; empty if it is."""
    if log_of(one, options).exists():
        return DONE
    if time.monotonic() + one.seconds > deadline:
        return f"left for lack of time: it takes {one.seconds:.0f} s"
    return ""


def started(
    one: Benchmark, gpus: list[str], every: list[str], deadline: float, options: argparse.Namespace
) -> Running:
    """Runs its command on these GPUs, and on as large a share of the processor's cores: a benchmark
    must not slow down its neighbour.
    """
    texts = f"data.source=text data.path={options.texts} data.directory=data/books "
    command = one.command.format(
        output=Path(options.output) / f"{one.name}_{hardware()['device'].split()[-1].lower()}",
        commit=options.commit or commit(),
        texts=texts + f"data.validation_path={options.validation_texts}",
        left=min(int(deadline - time.monotonic() - ENDING), 10**6),
    )
    cores = sorted(os.sched_getaffinity(0))
    owners = {core: every[place * len(every) // len(cores)] for place, core in enumerate(cores)}
    own = [core for core in cores if owners[core] in gpus] or cores
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` is this one
    log = unfinished(log_of(one, options))
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as opened:
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdout=opened,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PATH": path},
            preexec_fn=lambda: os.sched_setaffinity(0, own),
            start_new_session=True,
        )
    return Running(one, process, gpus, time.monotonic())


def ended(one: Running, options: argparse.Namespace) -> bool:
    """Says how it has ended; whether well."""
    status, log = one.process.returncode, log_of(one.benchmark, options)
    took = f"after {time.monotonic() - one.began:.0f} s"
    if status == 0:
        unfinished(log).rename(log)
        print(f"{one.benchmark.name}: done {took}", flush=True)
        return True
    lines = [line for line in unfinished(log).read_text(errors="replace").splitlines() if line]
    last = "; ".join([f"status {status} {took}", *lines[-1:]])
    print(f"{one.benchmark.name}: {last} (see {unfinished(log)})", flush=True)
    return False


def log_of(one: Benchmark, options: argparse.Namespace) -> Path:
    return Path(options.output) / "logs" / f"{one.name}.log"


def unfinished(log: Path) -> Path:
    """What the log is called until its benchmark has ended well."""
    return log.with_suffix(".partial")


if __name__ == "__main__":
    run_command(main)
