"""How late a step is after a checkpoint: wall time from step to step, saves included, of a run that
saves every so often.

    python benchmarks/save_stall.py --config configs/comparison.yaml --output PATH.json
    torchrun --standalone --nproc_per_node 2 benchmarks/save_stall.py --config ...

Prints, and writes with hardware and commit, the median step, and the steps that save and those
after them as multiples of it, the first save apart. Also what looking for NaN and infinity costs,
as shares of the median step: the look at weights and optimizer state before each save
(`state_check`, timed after the run, by itself), and the look at each step's gradient
(`gradient_check`, on a GPU).
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from saving import measured_by

from mixer.checkpoints import writer
from mixer.common.errors import UserError, run_command
from mixer.common.files import write_text
from mixer.training import loop
from mixer.training.config import RunConfig, load_config
from mixer.training.guard import Guard


def main() -> None:
    options, overrides = arguments()
    # one directory for all processes
    launch = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))
    directory = Path(tempfile.gettempdir()) / f"save_stall-{launch}"
    run = run_that_saves(options, [f"output_dir={directory}", *overrides])
    marks, state_looks, looks = note_times()
    loop.train(run)
    if os.environ.get("RANK", "0") != "0":
        return
    shutil.rmtree(directory)
    found = report(marks, options.every)
    step = found["median_step_seconds"]
    found["state_check_seconds"] = seconds_of(state_looks[-1])
    found["state_check_share_of_a_step"] = found["state_check_seconds"] / step
    if looks:
        seconds = statistics.median(begin.elapsed_time(end) for begin, end in looks) / 1e3
        found["gradient_check_share_of_a_step"] = seconds / step
    text = json.dumps(found | measured_by(options), indent=1)
    print(text)
    if options.output:
        write_text(options.output, text + "\n")


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--output", type=Path, help="a JSON file for what is found")
    parser.add_argument("--commit", default="", help="commit that is measured; default: git's")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    return parser.parse_known_args()


def run_that_saves(options: argparse.Namespace, overrides: list[str]) -> RunConfig:
    """The configuration's run, which saves every --every steps, and does nothing else but train."""
    settings = [f"checkpoint.save_every={options.every}", "train.eval_every=0"]
    run = load_config(options.config, [*settings, "logging.log_every=1000000", *overrides])
    if options.every < 5 or run.train.steps <= 2 * options.every:
        raise UserError(
            f"--every {options.every}, train.steps = {run.train.steps}; allowed: 5 or more, and "
            "more than twice that"
        )
    return run


def note_times() -> tuple[list[float], list[Callable], list[tuple[torch.cuda.Event, ...]]]:
    """Has training note, in lists that are empty yet: when each step begins, the look at the whole
    state of each save, to be repeated, and events around each look at a gradient.
    """
    marks, state_looks, looks = [], [], []
    real_ask = loop.Stop.ask

    def ask(stop) -> None:  # the loop's first act in each step
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        real_ask(stop)

    loop.Stop.ask = ask
    real_look = writer.Look

    def look(tensors):  # repeated it asks no other process, as those have ended then
        state_looks.append(lambda: real_look(tensors).not_finite())
        return real_look(tensors)

    writer.Look = look
    if torch.cuda.is_available():
        Guard.before_step = between_events(Guard.before_step, looks)
    return marks, state_looks, looks


def seconds_of(function: Callable, times: int = 10) -> float:
    """The median time of a function that waits for the device itself."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def between_events(function: Callable, pairs: list) -> Callable:
    """The function, between two events of the GPU for each call: it does not wait for it."""

    def call(*arguments):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function(*arguments)
        end.record()
        pairs.append((begin, end))

    return call


def report(marks: list[float], every: int) -> dict:
    """Step n (from 1) runs from mark n - 1 to mark n, with the save that follows it."""
    # the first interval warms up, and the first save makes memory for the others
    seconds = {n: marks[n] - marks[n - 1] for n in range(every + 1, len(marks))}
    places = {n: n % every for n in seconds}
    quiet = statistics.median(s for n, s in seconds.items() if places[n] > every // 2)
    first = (marks[every] - marks[every - 1]) / quiet
    found = {"median_step_seconds": quiet, "first_save": first}
    for name, place in (("saving", 0), ("first_after", 1), ("second_after", 2)):
        ratios = [s / quiet for n, s in seconds.items() if places[n] == place]
        found[f"{name}_median"], found[f"{name}_worst"] = statistics.median(ratios), max(ratios)
    return found


if __name__ == "__main__":
    run_command(main)
