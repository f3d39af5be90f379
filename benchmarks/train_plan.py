"""Trains the runs of a plan on every visible GPU, one process each, and compares what they reach.

    python benchmarks/train_plan.py PLAN.yaml --output PATH [--only NAME ...] \\
        [section.key=value ...]

A plan has `common`, the options of all runs, and either

- `runs`: for each name the options that differ. `reference` names the run that the report compares
  the others with.
- `kinds`: for each kind of model its sizes, and for each size the options that differ. Each model
  trains for a few steps, which measures its speed; at each of `rates`, for `sweep_share` of the
  steps that it does in `seconds`; and for `seconds` at the best of these rates and at the next
  lower one. Then the best size of a kind trains for each of `seconds_of_best`, again at its rate
  and at the next lower one. After these longer runs the loss is also measured by position and by
  kind of token.

Where a plan or a run names a configuration as its `recipe`, the optimizer and the initial mixing
weights are from there. Overrides of the command line go before the options of a run. Plans are in
benchmarks/plans.

PATH.json has each run when it ends, and a run that it has is not repeated. SIGTERM or SIGINT stops
the runs, which are saved in PATH-runs, and the exit status is 3: the same command goes on where
they were cut. PATH.md and PATH.png come at the end; plan_report.py makes them from PATH.json alone.
"""

import argparse
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median

import numpy as np
import torch
from plan_report import best_size, has_jumped, mean_by_position, write_report
from saving import write_json
from transformers import PreTrainedModel

from mixer.common.errors import NotFinite, UserError, first_line, run_command
from mixer.common.provenance import commit, hardware
from mixer.common.yaml_file import parse_yaml, read_yaml
from mixer.comparison.result import last_validation
from mixer.data.config import check as check_data
from mixer.data.manifest import Manifest
from mixer.data.token_file import TokenFile
from mixer.evaluation.evaluate import loss_by_kind
from mixer.evaluation.measure import AUTOCAST_TYPES
from mixer.evaluation.scoring import evaluate_streams
from mixer.reporting.metrics_file import read_metrics
from mixer.training.config import RunConfig, load_config, override
from mixer.training.loop import train

EPOCHS = 4  # no run reads its text more often: beyond, repeated text is worth less (2305.16264)
NEAR = 0.03  # relative difference of steps up to which a run is the one that is asked for
LEFT = 3  # exit status of a command that must be given again to do all
POINTS = 60  # of a curve of the results
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Run:
    """What one process trains."""

    name: str
    settings: dict  # by section.key
    about: dict = field(default_factory=dict)  # kind, size, budget and lr of a model's run
    by_position: bool = False  # whether the loss is measured by position and by kind of token


Job = Generator[Run, dict, None]  # yields runs, one after the other, and receives their rows


@dataclass(frozen=True)
class Model:
    """One size of one kind, with all options of its runs but those of a sweep."""

    kind: str
    size: str
    options: dict  # by section.key

    @property
    def name(self) -> str:
        return f"{self.kind} {self.size}"

    def settings(self, rate: float, steps: int) -> dict:
        # More than a third of a short run would be most of what a sweep compares.
        warmup = min(self.options["optim.warmup_steps"], steps // 3)
        changes = {"train.steps": steps, "optim.lr": rate, "optim.warmup_steps": warmup}
        return self.options | changes

    def run(self, budget: float, rate: float, steps: int, by_position: bool = False) -> Run:
        """budget: the seconds that the steps are meant to take; 0 for the run that measures the
        speed.
        """
        name = f"{self.name}, {budget:g} s, lr {rate:g}" if budget else f"{self.name}, speed"
        about = {"kind": self.kind, "size": self.size, "budget": budget, "lr": rate}
        return Run(name, self.settings(rate, steps), about, by_position)


# ------------------------------------------------------------------------- what a plan asks for


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", help="YAML file, see benchmarks/plans")
    parser.add_argument("--output", required=True, help="path of the results without ending")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="runs, kinds or models; default: all"
    )
    parser.add_argument("--commit", default="", help="commit that is measured; default: git's")
    options, overrides = parser.parse_known_args()
    overrides += [name for name in options.only if "=" in name]  # they may follow --only
    only = [name for name in options.only if "=" not in name]
    plan, given = read_yaml(options.plan), given_options(overrides)
    file = Path(options.output + ".json")
    result = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    known = result["runs"]
    jobs = jobs_of_runs(plan, given, only, known) if "runs" in plan else None
    jobs = jobs or jobs_of_kinds(plan, given, only, known)
    result |= {"command": shlex.join(["python", *sys.argv]), "plan": plan}
    study = Study(result, file, Path(options.output + "-runs"), options.commit or commit())
    study.work(jobs)
    if known:
        print(write_report(file))
    if study.problems:
        raise UserError("\n".join(study.problems))
    if study.stopped:
        print("stopped by a signal; the same command goes on")
        sys.exit(LEFT)


def given_options(overrides: list[str]) -> dict:
    """The options that the command line gives, by section.key."""
    wrong = [text for text in overrides if "=" not in text]
    if wrong:
        raise UserError(f"{' '.join(wrong)}: write overrides as section.key=value")
    given = dict(text.split("=", 1) for text in overrides)
    return {key: parse_yaml(value) if value else "" for key, value in given.items()}


def recipe(changes: dict) -> dict:
    """The options of the configuration that a plan or a run names as its recipe."""
    if "recipe" not in changes:
        return {}
    file = read_yaml(changes["recipe"])
    options = {f"optim.{name}": value for name, value in file["optim"].items()}
    return options | {"model.mixing_init": file["model"].get("mixing_init", "reference")}


def runs_of(plan: dict, given: dict) -> list[Run]:
    found = []
    for name, changes in plan["runs"].items():
        settings = plan["common"] | recipe(changes) | given | changes
        settings.pop("recipe", None)
        found.append(Run(name, settings))
    return found


def models_of(plan: dict, given: dict) -> list[Model]:
    common = recipe(plan) | plan["common"] | given
    return [
        Model(kind, str(size), common | own)
        for kind, sizes in plan["kinds"].items()
        for size, own in sizes.items()
    ]


def jobs_of_runs(plan: dict, given: dict, only: list[str], known: dict) -> list[Job]:
    runs = runs_of(plan, given)
    check_names(only, {run.name for run in runs})
    for run in runs:
        check(run.settings)
        check_known(run.name, known.get(run.name), run.settings)

    def job(run: Run) -> Job:
        yield run

    return [job(run) for run in runs if not only or run.name in only]


def jobs_of_kinds(plan: dict, given: dict, only: list[str], known: dict) -> list[Job]:
    models = models_of(plan, given)
    check_names(only, {name for model in models for name in (model.kind, model.name)})
    by_name = {model.name: model for model in models}
    for model in models:
        check(model.options)
    for name, row in known.items():
        if model := by_name.get(f"{row['kind']} {row['size']}"):
            own = row["settings"]
            check_known(name, row, model.settings(own["optim.lr"], own["train.steps"]))

    jobs = []
    for kind in plan["kinds"]:
        own = [model for model in models if model.kind == kind]
        chosen = [model for model in own if not only or {kind, model.name} & set(only)]
        if chosen:
            jobs.append(job_of_kind(plan, own, chosen, known))
    return jobs


def check_names(only: list[str], allowed: set[str]) -> None:
    unknown = [name for name in only if name not in allowed]
    if unknown:
        raise UserError(
            f"--only {shlex.join(unknown)}: not in the plan; allowed: {shlex.join(sorted(allowed))}"
        )


def check(settings: dict) -> None:
    check_data(load_config(None, [override(*item) for item in settings.items()]).data)


def check_known(name: str, row: dict | None, settings: dict) -> None:
    """Raises UserError if the results have a run of this name that had other options."""
    had = row["settings"] if row else settings
    other = [key for key in sorted({*had, *settings}) if had.get(key) != settings.get(key)]
    if other:
        said = ", ".join(f"{key} {had.get(key)}, not {settings.get(key)}" for key in other)
        raise UserError(
            f"the results have {name!r} with other options: {said}. Give those options, or another "
            "--output"
        )


def job_of_kind(plan: dict, models: list[Model], chosen: list[Model], known: dict) -> Job:
    """All runs of the chosen sizes of a kind, and longer ones of the best of all sizes."""
    for model in chosen:
        yield from runs_of_model(plan, model, known)
    for seconds in plan.get("seconds_of_best", []):
        best = best_size(known, models[0].kind, plan["seconds"])
        if best is None:
            raise UserError(f"{models[0].kind}: no size has a loss after {plan['seconds']:g} s")
        model = next(model for model in models if model.size == best["size"])
        yield from longer_runs(plan, model, seconds, [best], known)


def runs_of_model(plan: dict, model: Model, known: dict) -> Job:
    """A run that measures the speed, those of all rates, and the longer ones."""
    lowest, share, seconds = min(plan["rates"]), plan["sweep_share"], plan["seconds"]
    speed = yield model.run(0, lowest, 4 * model.options["logging.log_every"])
    if "failure" in speed:
        raise UserError(f"{model.name}: diverges at {lowest:g}, the lowest rate; add lower ones")
    steps = max(1, round(share * steps_in(seconds, speed)))
    swept = []
    for rate in plan["rates"]:
        swept.append((yield model.run(share * seconds, rate, steps)))
    good = [row for row in swept if "failure" not in row]
    if not good:
        raise UserError(f"{model.name}: diverges at all rates; add lower ones")
    yield from longer_runs(plan, model, seconds, good, known)


def longer_runs(plan: dict, model: Model, seconds: float, shorter: list[dict], known: dict) -> Job:
    """A model at the best rate of shorter runs and at the next lower one, which more steps may
    want; at yet lower ones if the loss jumped at both.
    """
    best = min(shorter, key=lambda row: row["validation_loss"])
    fastest = max(shorter, key=lambda row: row["tokens_per_second"])
    rates = sorted((rate for rate in plan["rates"] if rate <= best["lr"]), reverse=True)
    is_good = False
    for place, rate in enumerate(rates):
        row = yield model.run(seconds, rate, steps_in(seconds, fastest), by_position=True)
        is_good |= "failure" not in row and not has_jumped(known, row)
        if is_good and place:
            return


def steps_in(seconds: float, measured: dict) -> int:
    """The steps that a model was measured to do in a time, at most EPOCHS of its text."""
    most = EPOCHS * measured["training_tokens"]
    tokens = min(seconds * measured["tokens_per_second"], most)
    return max(1, int(tokens / measured["tokens_a_step"]))


# ------------------------------------------------------------------------- the processes


class Study:
    """The results, and the processes that add to them."""

    def __init__(self, result: dict, file: Path, folder: Path, commit: str):
        self.result, self.file, self.folder, self.commit = result, file, folder, commit
        self.problems: list[str] = []
        self.stopped = False
        self.processes: dict[Connection, multiprocessing.Process] = {}

    def work(self, jobs: list[Job]) -> None:
        """Runs of several jobs take turns, so that what is interrupted has something to compare."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in SIGNALS:
            signal.signal(number, self.stop)
        waiting, free, running = deque((job, None) for job in jobs), visible_gpus(), {}
        while running or (waiting and not self.stopped):
            while waiting and free and not self.stopped:
                job, row = waiting.popleft()
                run = self.next_run(job, row)
                if run and (known := self.known(run)):
                    waiting.appendleft((job, known))
                elif run:
                    gpu = free.pop()
                    running[self.start(run, gpu)] = job, run, gpu
            for connection in wait(list(running)) if running else ():
                job, run, gpu = running.pop(connection)
                free.append(gpu)
                if row := self.outcome(connection, run):
                    waiting.append((job, row))

    def stop(self, *_) -> None:
        self.stopped = True
        for process in self.processes.values():
            process.terminate()

    def next_run(self, job: Job, row: dict | None) -> Run | None:
        try:
            return job.send(row)
        except StopIteration:
            return None
        except UserError as error:  # the other jobs go on
            self.problems.append(str(error))
            return None

    def known(self, run: Run) -> dict | None:
        row, steps = self.result["runs"].get(run.name), run.settings["train.steps"]
        return row if row and abs(row["settings"]["train.steps"] - steps) <= NEAR * steps else None

    def start(self, run: Run, gpu: str) -> Connection:
        # A fork has imported everything already, but CUDA does not survive one.
        context = multiprocessing.get_context("spawn" if gpu else "fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=report_run, args=(theirs, run, self.folder, gpu))
        process.start()
        theirs.close()  # so that the end of the process ends what is read
        self.processes[ours] = process
        if self.stopped:  # by a signal that came before this process was known
            process.terminate()
        return ours

    def outcome(self, connection: Connection, run: Run) -> dict | None:
        """The row of a process that has ended, if its run has."""
        try:
            row = connection.recv()
        except EOFError:
            row = None
        self.processes.pop(connection).join()
        try:
            if row is None and not self.stopped:
                raise UserError("its process was stopped; the same command goes on")
            if isinstance(row, str):
                raise UserError(row)
            if row:
                self.add(run, row)
        except UserError as error:
            self.problems.append(f"{run.name}: {error}")
            return None
        return row

    def add(self, run: Run, row: dict) -> None:
        runs = self.result["runs"]
        require_same_text(row, runs, self.file)
        row["commit"] = self.commit
        runs[run.name] = row
        write_json(self.file, self.result)
        loss = f"loss {row['validation_loss']:.4f}" if "validation_loss" in row else "diverged"
        print(f"{run.name}: {loss}", flush=True)


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; one without a name where there is none."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return named.split(",")[:count] or [""]


def require_same_text(measured: dict, runs: dict[str, dict], file: Path) -> None:
    """Raises UserError if runs of `file` with the same options for data had another text."""

    def data(one: dict) -> dict:
        return {key: value for key, value in one["settings"].items() if key.startswith("data.")}

    text = measured["text_sha256"]
    for name, other in runs.items():
        if other.get("text_sha256", text) != text and data(other) == data(measured):
            raise UserError(
                f"the text has changed: {file} has a run {name!r} with the same options for data, "
                "and other tokens. Runs are compared on one text alone: give that text, or another "
                "--output"
            )


# ------------------------------------------------------------------------- in a run's process


def report_run(connection: Connection, run: Run, folder: Path, gpu: str) -> None:
    """Sends a run's row, or what was wrong in words, or nothing of a run that a signal stopped."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=stop_with_parent, daemon=True).start()
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    name = re.sub(r"[^\w.+-]+", "-", run.name)
    with open(folder / f"{name}.txt", "a") as log, redirect_stdout(log):
        try:
            connection.send(train_run(run, name, folder))
        except UserError as error:
            connection.send(str(error))
        except Exception as error:
            traceback.print_exc(file=log)
            connection.send(f"{first_line(error)}; more in {log.name}")


def stop_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGTERM)


def train_run(run: Run, name: str, folder: Path) -> dict | None:
    """What a run measures; None if a signal has stopped it, and it was saved."""
    given = [override(*item) for item in run.settings.items()]
    given += [f"name={name}", f"output_dir={folder}", "train.eval_every=0"]
    config = load_config(None, [*given, "checkpoint.save_every=0", "checkpoint.save_last=false"])
    saved = config.directory / "config.yaml"
    if saved.exists() and load_config(str(saved), []) != config:  # of other options
        shutil.rmtree(config.directory)
    row = run.about | {"settings": run.settings, "hardware": hardware()}
    try:
        model = train(config)
    except NotFinite as error:  # a run that diverges is a result, too
        row["failure"] = str(error)
    else:
        for number in SIGNALS:  # what is left takes seconds
            signal.signal(number, signal.SIG_IGN)
        lines = read_metrics(config.directory)
        if lines[-1]["step"] < config.train.steps:
            return None
        row |= measured(lines, config, min if run.about.get("budget") == 0 else median)
        row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        row |= where(model, config) if run.by_position else {}
    shutil.rmtree(config.directory)
    splits = Manifest.load(config.data.directory).splits.values()
    return row | {"text_sha256": [split.tokens_sha256 for split in splits]}


def measured(lines: list[dict], config: RunConfig, typical: Callable[[list[float]], float]) -> dict:
    """typical: of the times of a step. A speed has few, and starts of other processes may slow all
    of them but one.
    """
    windows = [line for line in lines if "loss" in line]
    last, validation = windows[-1], last_validation(lines)
    each = seconds_a_step(windows, typical)
    tokens_a_step = last["tokens"] // last["step"]
    text = Manifest.load(config.data.directory).splits["train"]
    norms = [line["grad_norm"] for line in windows if line["grad_norm"]]
    found = {
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_a_step": tokens_a_step,
        "tokens_per_second": tokens_a_step / each,
        "training_seconds": last["step"] * each,
        "training_tokens": text.tokens,
        "passes": last["tokens"] / text.tokens,
        "peak_memory_gb": last["peak_memory_gb"],
        "validation_loss": validation["validation_loss"],
        "bits_per_byte": validation["validation_bits_per_byte"],
        "largest_grad_norm": max(norms, default=None),
        "largest_rise": largest_rise(
            [line["loss"] for line in windows if line["step"] > config.optim.warmup_steps]
        ),
    }
    for name in ("loss", "grad_norm"):
        found[name] = thinned([[line["step"], line[name]] for line in windows if line[name]])
    return found


def seconds_a_step(windows: list[dict], typical: Callable[[list[float]], float]) -> float:
    """What is typical of the logged windows but the first, to which each start adds something."""
    before = [0, *(line["step"] for line in windows)]
    each = [
        line["seconds"] / (line["step"] - first)
        for line, first in zip(windows, before, strict=False)
    ]
    return typical(each[1:] or each)


def largest_rise(losses: list[float]) -> float:
    """By how much the training loss rose at most above the lowest of the steps before, relative."""
    rise, lowest = 0.0, float("inf")
    for loss in losses:
        lowest = min(lowest, loss)
        rise = max(rise, loss / lowest - 1)
    return rise


def thinned(points: list) -> list:
    """At most POINTS of a curve, evenly chosen, the last one among them."""
    if len(points) <= POINTS:
        return points
    return [points[round(at)] for at in np.linspace(0, len(points) - 1, POINTS)]


def where(model: PreTrainedModel, config: RunConfig) -> dict:
    """The validation loss of the run's samples by position, and by kind of token."""
    context = config.model.max_position_embeddings
    validation = TokenFile(config.data.directory, "validation", context)
    samples = min(len(validation), config.train.eval_samples or len(validation))
    starts = np.arange(samples) * len(validation) // samples * context  # as in training
    model.config.use_cache = False  # a transformer would keep keys and values
    for part in model.modules():
        vars(part).pop("forward", None)  # what is compiled is for the trainer's calls alone
    scores = evaluate_streams(
        model,
        [validation.tokens[start : start + context + 1] for start in starts],
        context,
        batch_size=config.train.batch_size,
        device=next(model.parameters()).device,
        dtype=AUTOCAST_TYPES.get(config.train.mixed_precision),
    )
    by_position = mean_by_position(scores.loss_by_position)
    return loss_by_kind(scores) | {"loss_by_position": by_position}


if __name__ == "__main__":
    run_command(main)
