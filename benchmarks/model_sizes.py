"""Trains several kinds of models at several sizes for equal times, each at its best learning rate.

    python benchmarks/model_sizes.py PLAN.yaml --output PATH [--seconds-in-all N] \\
        [section.key=value ...]

Each model of the plan trains for a few steps, which measures its speed; at each of `rates`, for
`sweep_share` of the steps that it does in `seconds`; and for `seconds`, at the best of them and at
the next lower one, as more steps may want a lower rate. When all sizes of a kind have done so, the
best one trains for each of `seconds_of_best`, again at its rate and at the next lower one. After
these longer runs the validation loss is also measured by position and by kind of token. Plans are
in benchmarks/plans; where one names a configuration as its `recipe`, the optimizer and the initial
mixing weights are from there. Overrides of the command line go before the options of a model.

Every visible GPU works on models of its own. With --at-once N it has N processes, which take turns:
one trains while the others start and compile. That slows it: times are medians, and yet a run of
15 s has looked a quarter slower than it was. PATH.json has each run when it ends, and a run that
it has with the same options is not repeated (its steps may differ by 3%, as machines do): the same
command goes on where it was interrupted. Runs of a model whose options have changed are no
comparison: they move to `dropped` there. With --only it trains some models of the plan alone, named
by kind, which is all its sizes, or by kind and size; `seconds_of_best` are still for the best size.
With --seconds-in-all the command ends within so long: it begins no run that would take longer, but
for one of which a minute or more fits, which the next command resumes (from PATH-runs); the exit
status is 3 where one is left. PATH.md and PATH.png come at the end; model_sizes_report.py makes
them from PATH.json alone.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from gpu_workers import SAVING, NoTime, training, turn, workers
from model_sizes_report import best_size, has_jumped, write_report
from recipe import (
    LEFT,
    given_options,
    names_and_overrides,
    recipe,
    require_same_text,
    text_sha256,
    train_here,
)
from transformers import PreTrainedModel

from mixer.common.errors import NotFinite, UserError, first_line, run_command
from mixer.common.files import write_text
from mixer.common.locks import locked
from mixer.common.provenance import commit, hardware
from mixer.common.yaml_file import read_yaml
from mixer.comparison.result import last_validation
from mixer.data.config import check as check_data
from mixer.data.manifest import Manifest
from mixer.data.token_file import TokenFile
from mixer.evaluation.evaluate import loss_by_kind
from mixer.evaluation.measure import AUTOCAST_TYPES
from mixer.evaluation.scoring import evaluate_streams
from mixer.reporting.metrics_file import read_metrics
from mixer.training.config import RunConfig, load_config, override

PASSES = 4  # no run reads its text more often: beyond, repeated text is worth less (2305.16264)
STARTING = 60.0  # seconds that a model's first run takes beside training, with compilation
WORTH_A_PART = 60.0  # seconds of training for which a run is begun that cannot end in time
NEAR = 0.03  # relative difference of steps up to which a run is the one that is asked for
# The options in which the runs of one model differ.
OF_A_RUN = ("train.steps", "optim.lr", "optim.warmup_steps")


@dataclass(frozen=True)
class Model:
    """One size of one kind, with all options of its runs but those of a sweep."""

    kind: str
    size: str
    options: dict  # by section.key

    @property
    def name(self) -> str:
        return f"{self.kind} {self.size}"


@dataclass(frozen=True)
class Study:
    """The plan, and where its results are."""

    plan: dict
    models: tuple[Model, ...]
    file: Path  # PATH.json
    folder: Path  # PATH-runs, with what runs print, and the checkpoints of interrupted ones
    deadline: float  # in seconds of time.time()
    at_once: int  # processes of a GPU
    commit: str

    def runs(self) -> dict[str, dict]:
        return json.loads(self.file.read_text())["runs"]

    def add(self, name: str, row: dict) -> None:
        with locked(self.folder / "results.lock"):  # other workers add theirs
            result = json.loads(self.file.read_text())
            require_same_text(row, result["runs"], self.file)
            result["runs"][name] = row
            write_text(self.file, json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", help="YAML file, see benchmarks/plans")
    parser.add_argument("--output", required=True, help="path of the results without ending")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="MODEL", help="kinds or models; default: all"
    )
    parser.add_argument("--seconds-in-all", type=float, default=math.inf, help="see above")
    parser.add_argument("--at-once", type=int, default=1, help="processes of a GPU, see above")
    parser.add_argument("--commit", default="", help="commit that is measured; default: git's")
    options, overrides = parser.parse_known_args()
    only, overrides = names_and_overrides(options.only, overrides)
    if options.at_once < 1:
        parser.error(f"--at-once {options.at_once}; allowed: 1 or more")
    output = Path(options.output)
    file = output.with_name(output.name + ".json")
    folder = output.with_name(output.name + "-runs")
    plan = read_yaml(options.plan)
    models = tuple(models_of(plan, overrides))
    chosen = tuple(chosen_of(models, only))
    began = psutil.Process().create_time()  # imports take seconds, too
    deadline = began + options.seconds_in_all
    measured_by = options.commit or commit()
    study = Study(plan, chosen, file, folder, deadline, options.at_once, measured_by)
    for model in models:
        check_data(load(study, model.options, "check").data)
    folder.mkdir(parents=True, exist_ok=True)
    result = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    changed = {name: row for name, row in result["runs"].items() if has_changed(row, models)}
    if changed:
        print(f"{len(changed)} runs had other options: they are under 'dropped' in {file} now")
        result["dropped"] = result.get("dropped", {}) | changed
        result["runs"] = {key: row for key, row in result["runs"].items() if key not in changed}
    result |= {"command": shlex.join(["python", *sys.argv]), "plan": plan}
    write_text(file, json.dumps(result, indent=1) + "\n")
    left, problems = work(study)
    print(write_report(file))
    if problems:
        raise UserError("\n".join(problems))
    if left:
        print(f"left for the next command: {', '.join(left)}")
        sys.exit(LEFT)


def models_of(plan: dict, overrides: list[str]) -> list[Model]:
    """The first size of every kind, then the second ones, and so on: what is interrupted has
    something to compare.
    """
    common = recipe(plan) | plan["common"] | given_options(overrides)
    found = [
        (place, Model(kind, str(size), common | own))
        for kind, sizes in plan["kinds"].items()
        for place, (size, own) in enumerate(sizes.items())
    ]
    return [model for _, model in sorted(found, key=lambda item: item[0])]


def chosen_of(models: tuple[Model, ...], names: list[str]) -> list[Model]:
    """The models that `names` name, by kind or by kind and size; all if there are none."""
    allowed = {model.kind for model in models} | {model.name for model in models}
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise UserError(
            f"--only {' '.join(map(shlex.quote, unknown))}: not in the plan; allowed: "
            f"{' '.join(map(shlex.quote, sorted(allowed)))}"
        )
    return [model for model in models if not names or {model.kind, model.name} & set(names)]


def has_changed(row: dict, models: tuple[Model, ...]) -> bool:
    """Whether a run is of a model of the plan that had other options when it was made."""

    def common(options: dict) -> dict:
        return {key: value for key, value in options.items() if key not in OF_A_RUN}

    settings = row["settings"]
    return any(
        common(model.options) != common(settings)
        or settings["optim.warmup_steps"] != warmup(model, settings["train.steps"])
        for model in models
        if (model.kind, model.size) == (row["kind"], row["size"])
    )


def warmup(model: Model, steps: int) -> int:
    """More than a third of a short run would be most of what a sweep compares."""
    return min(model.options["optim.warmup_steps"], steps // 3)


def work(study: Study) -> tuple[list[str], list[str]]:
    """Does what the plan asks for, a job for each worker at a time; returns what is left for lack
    of time, and what went wrong.
    """
    free, left, problems = workers(study.folder, study.at_once), [], []
    sizes_left = Counter(model.kind for model in study.models)
    waiting = deque((train_model, study, model) for model in study.models)
    running: dict[Future, tuple[tuple, ProcessPoolExecutor]] = {}
    while running or (waiting and free):
        while waiting and free:
            job, worker = waiting.popleft(), free.pop(0)
            running[worker.submit(*job)] = job, worker
        for ended in wait(running, return_when=FIRST_COMPLETED).done:
            (function, _, about, *_), worker = running.pop(ended)
            error = ended.exception()
            if not isinstance(error, BrokenProcessPool):
                free.append(worker)
            if isinstance(error, NoTime):
                left.append(str(error))
            elif error is not None:  # the other jobs go on
                problems.append(f"{name_of(about)}: {first_line(error)}")
            elif function is train_model:
                sizes_left[about.kind] -= 1
                if not sizes_left[about.kind]:
                    longer = study.plan.get("seconds_of_best", [])
                    waiting += [(train_best, study, about.kind, seconds) for seconds in longer]
    for worker in free:
        worker.shutdown()
    left += [name_of(about) for _, _, about, *_ in waiting]  # no worker is alive
    return left, problems


def name_of(about: Model | str) -> str:
    """Of what a job trains: a model, or the best of a kind."""
    return about if isinstance(about, str) else about.name


def train_model(study: Study, model: Model) -> None:
    """The speed of a model, its runs at all rates, and its longer ones."""
    plan = study.plan
    short = 4 * load(study, model.options, "speed").logging.log_every
    speed = train_for(study, model, 0, min(plan["rates"]), short)
    if "failure" in speed:
        raise UserError(f"it diverges at {speed['lr']:g}, the plan's lowest rate; give lower ones")
    steps = max(1, round(plan["sweep_share"] * steps_in(plan["seconds"], speed)))
    budget = plan["sweep_share"] * plan["seconds"]
    swept = [train_for(study, model, budget, rate, steps) for rate in plan["rates"]]
    good = [row for row in swept if "failure" not in row]
    if not good:
        raise UserError("it diverges at all rates; give lower ones")
    train_longer(study, model, plan["seconds"], good)


def train_best(study: Study, kind: str, seconds: float) -> None:
    """The size of a kind that was the best after the plan's `seconds`, for longer."""
    best = best_size(study.runs(), kind, study.plan["seconds"])
    if best is None:
        raise UserError(f"no size of {kind} has a loss after {study.plan['seconds']:g} s")
    for model in study.models:  # it may not be one that --only names
        if (model.kind, model.size) == (kind, best["size"]):
            train_longer(study, model, seconds, [best])


def train_longer(study: Study, model: Model, seconds: float, shorter: list[dict]) -> None:
    """A model at the best rate of shorter runs and at the next lower one, which more steps may
    want; at yet lower ones if the loss jumped at both.
    """
    best = min(shorter, key=lambda row: row["validation_loss"])
    fastest = max(shorter, key=lambda row: row["tokens_per_second"])  # others at once only slow it
    rates = sorted((rate for rate in study.plan["rates"] if rate <= best["lr"]), reverse=True)
    is_good = False
    for place, rate in enumerate(rates):
        row = train_for(study, model, seconds, rate, steps_in(seconds, fastest))
        is_good |= "failure" not in row and not has_jumped(study.runs(), row)
        if is_good and place:
            return


def steps_in(seconds: float, measured: dict) -> int:
    """The steps that a model was measured to do in a time, at most PASSES passes over its text."""
    most = PASSES * measured["training_tokens"]
    tokens = min(seconds * measured["tokens_per_second"], most)
    return max(1, int(tokens / measured["tokens_a_step"]))


def load(study: Study, settings: dict, name: str) -> RunConfig:
    given = [override(key, value) for key, value in settings.items()]
    given += [f"name={name}", f"output_dir={study.folder}", "train.eval_every=0"]
    return load_config(None, [*given, "checkpoint.save_every=0", "checkpoint.save_last=false"])


def train_for(study: Study, model: Model, budget: float, rate: float, steps: int) -> dict:
    """A run's row of the results, by training unless it is there.

    budget: the seconds of training that the steps are meant to take; 0 for the run that measures
    the speed. Raises NoTime where the run is left to the next command, whole or in part.
    """
    name = f"{model.name}, {budget:g} s, lr {rate:g}" if budget else f"{model.name}, speed"
    changes = {"train.steps": steps, "optim.lr": rate, "optim.warmup_steps": warmup(model, steps)}
    settings = model.options | changes
    known = study.runs().get(name)
    if known and known["lr"] == rate:
        if abs(known["settings"]["train.steps"] - steps) <= NEAR * steps:
            return known
    config = load(study, settings, name.replace(", ", "-").replace(" ", "-"))
    began = time.time()
    check_time(study, model, budget, name)
    measured = {"kind": model.kind, "size": model.size, "budget": budget, "lr": rate}
    measured |= {"settings": settings, "hardware": hardware(), "commit": study.commit}
    measured |= {"at_once": study.at_once}
    try:
        measured |= train(study, config, budget)
    except NotFinite as error:  # a run that diverges is a result, too
        measured |= {"failure": first_line(error), "text_sha256": text_sha256(config)}
    finally:
        turn.close()
    shutil.rmtree(config.directory)
    measured["wall_seconds"] = time.time() - began
    # A run that went on has trained in earlier commands, too.
    beside[model.name] = max(0.0, measured["wall_seconds"] - measured.get("training_seconds", 0))
    study.add(name, measured)
    loss = f"{measured['validation_loss']:.4f}" if "validation_loss" in measured else "diverged"
    print(f"{name}: loss {loss}, {measured['wall_seconds']:.0f} s with start", flush=True)
    return measured


# What the last run of each model took in this process beside its training, in seconds.
beside: dict[str, float] = {}


def check_time(study: Study, model: Model, budget: float, name: str) -> None:
    """Raises NoTime unless a run ends in time, or a good part of it fits."""
    # A longer start than that has compiled what this process now has, or waited for its turn.
    starting = min(STARTING, beside.get(model.name, STARTING))
    left = study.deadline - SAVING - time.time() - starting
    if left < min(budget, WORTH_A_PART):
        raise NoTime(name)


def train(study: Study, config: RunConfig, budget: float) -> dict:
    """What a run measures. It is stopped at the end of the command's time, and then saved."""
    saved = config.directory / "config.yaml"
    if saved.exists() and load_config(str(saved), []) != config:  # of other options
        shutil.rmtree(config.directory)
    log = study.folder / f"{config.name}.txt"
    with open(log, "a") as file, redirect_stdout(file), training:
        with stopped_at(study.deadline - SAVING):
            model = train_here(config)
    lines = read_metrics(config.directory)
    if lines[-1]["step"] < config.train.steps:
        raise NoTime(f"{config.name}, stopped at step {lines[-1]['step']} of {config.train.steps}")
    last = [line for line in lines if "loss" in line][-1]
    text = Manifest.load(config.data.directory).splits["train"]
    # Few windows measure a speed, and starts of other processes may slow all of them but one.
    each = seconds_a_step(lines, median if budget else min)
    tokens_a_step = last["tokens"] // last["step"]
    found = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "useful_flops_per_token": model.flops_per_token()["useful"],
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_a_step": tokens_a_step,
        "tokens_per_second": tokens_a_step / each,
        "training_seconds": last["step"] * each,
        "training_tokens": text.tokens,
        "text_sha256": text_sha256(config),
        "passes": last["tokens"] / text.tokens,
        "peak_memory_gb": last["peak_memory_gb"],
        "validation_loss": last_validation(lines)["validation_loss"],
        "bits_per_byte": last_validation(lines)["validation_bits_per_byte"],
    }
    if budget >= study.plan["seconds"]:
        found |= where(model, config)
        found["loss"] = [[line["step"], line["loss"]] for line in lines if "loss" in line]
    return found


@contextmanager
def stopped_at(moment: float):
    """Has a run end and save at a moment, by the signal with which a cluster would stop it."""
    timer = threading.Timer(moment - time.time(), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    if moment < math.inf:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def seconds_a_step(lines: list[dict], typical: Callable[[list[float]], float]) -> float:
    """What is typical of the logged windows but the first, to which each start adds something."""
    windows = [line for line in lines if "loss" in line]
    before = [0, *(line["step"] for line in windows)]
    each = [
        line["seconds"] / (line["step"] - first)
        for line, first in zip(windows, before, strict=False)
    ]
    return typical(each[1:] or each)


def where(model: PreTrainedModel, config: RunConfig) -> dict:
    """The validation loss of the run's samples by position, and by kind of token."""
    validation = TokenFile(
        config.data.directory, "validation", config.model.max_position_embeddings
    )
    samples = min(len(validation), config.train.eval_samples or len(validation))
    model.config.use_cache = False  # a transformer would keep keys and values
    for part in model.modules():
        vars(part).pop("forward", None)  # what is compiled is for the trainer's calls alone
    starts = np.arange(samples) * len(validation) // samples * validation.context
    scores = evaluate_streams(
        model,
        [np.asarray(validation.tokens[at : at + validation.context + 1]) for at in starts],
        validation.context,
        batch_size=config.train.batch_size,
        device=next(model.parameters()).device,
        dtype=AUTOCAST_TYPES.get(config.train.mixed_precision),
    )
    by_position = [round(loss, 4) for loss in scores.loss_by_position]
    return loss_by_kind(scores) | {"loss_by_position": by_position}


if __name__ == "__main__":
    run_command(main)
