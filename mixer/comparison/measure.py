"""A run of a plan, in a process of its own: it trains by the trainer itself and measures."""

import re
import shutil
import signal
import traceback
from contextlib import redirect_stdout
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
from transformers import PreTrainedModel

from mixer.common.errors import NotFinite, UserError, end_with_parent, first_line
from mixer.common.hardware import hardware
from mixer.comparison.plan import Run
from mixer.data.batches import Samples
from mixer.data.prepare import open_data
from mixer.data.prepared import Manifest
from mixer.evaluation.scoring import AUTOCAST_TYPES, evaluate_batches, sample_batches
from mixer.reporting.metrics_file import read_metrics
from mixer.training.config import RunConfig, load_config
from mixer.training.loop import train
from mixer.training.objective import useful_flops

POINTS = 60  # of a curve of the results
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def report_run(connection: Connection, run: Run, folder: Path) -> None:
    """Sends a run's row, or what was wrong in words, or nothing of a run that a signal stopped."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()
    name = re.sub(r"[^\w.+-]+", "-", run.name)
    with open(folder / f"{name}.txt", "a") as log, redirect_stdout(log):
        try:
            connection.send(train_run(run, name, folder))
        except UserError as error:
            connection.send(str(error))
        except Exception as error:
            traceback.print_exc(file=log)
            connection.send(f"{first_line(error)}; more in {log.name}")


def train_run(run: Run, name: str, folder: Path) -> dict | None:
    """What a run measures; None if a signal has stopped it, and it was saved."""
    given = [f"name={name}", f"output_dir={folder}", "train.eval_every=0"]
    given += ["checkpoint.save_every=0", f"checkpoint.save_last={str(run.keeps).lower()}"]
    config = run.config(*given)
    saved = config.directory / "config.yaml"
    if saved.exists() and load_config(str(saved), []) != config:  # of other options
        shutil.rmtree(config.directory)
    data = open_data(config.data, config.model.max_position_embeddings)
    text = [split.tokens_sha256 for split in data.manifest.splits.values()]
    row = run.about | {"settings": run.settings, "hardware": hardware(), "text_sha256": text}
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
        row |= measured(lines, data.manifest, is_speed=run.about.get("budget") == 0)
        row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        row["useful_tflops"] = useful_flops(model, config) * row["tokens_per_second"] / 1e12
        by_position = run.by_position and not config.is_contrastive
        row |= where(model, config, data.validation) if by_position else {}
    if run.keeps:
        row["checkpoint"] = str(config.directory / f"step-{config.train.steps}")
    else:
        shutil.rmtree(config.directory)
    return row


def measured(lines: list[dict], data: Manifest, is_speed: bool) -> dict:
    """What the metrics of a run say."""
    windows = [line for line in lines if "loss" in line]
    last, validation = windows[-1], [line for line in lines if "validation_loss" in line][-1]
    # Each start adds something to the first window. A run that measures the speed has few others,
    # and starts of other processes may slow all of them but one.
    each = [now["seconds"] / (now["step"] - was["step"]) for was, now in pairwise(windows)]
    seconds = (min if is_speed else median)(each or [last["seconds"] / last["step"]])
    tokens_a_step, text = last["tokens"] // last["step"], data.splits["train"]
    chosen = np.linspace(0, len(windows) - 1, min(POINTS, len(windows))).round().astype(int)
    found = {
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_a_step": tokens_a_step,
        "tokens_per_second": tokens_a_step / seconds,
        "training_seconds": last["step"] * seconds,
        "training_tokens": text.tokens,
        "passes": last["tokens"] / text.tokens,
        "peak_memory_gb": last["peak_memory_gb"],
        "validation_loss": validation["validation_loss"],
        "accuracy": validation.get("validation_accuracy"),
        "bits_per_byte": validation.get("validation_bits_per_byte"),
        "loss": [[windows[number]["step"], windows[number]["loss"]] for number in chosen],
    }
    return found | {name: validation[name] for name in validation if name.startswith("top1_of_")}


def where(model: PreTrainedModel, config: RunConfig, validation: Samples) -> dict:
    """The validation loss of the run's samples by position, and by kind of token."""
    batches = sample_batches(validation, config.train.eval_samples, config.train.batch_size)
    model.config.use_cache = False  # a transformer would keep keys and values
    for part in model.modules():
        vars(part).pop("forward", None)  # what is compiled is for the trainer's calls alone
    scores = evaluate_batches(
        model,
        batches,
        config.model.max_position_embeddings,
        next(model.parameters()).device,
        AUTOCAST_TYPES.get(config.train.mixed_precision),
    )
    losses = scores.by_position["loss_by_position"]
    return scores.by_kind | {"loss_by_position": mean_by_position(losses)}


def mean_by_position(losses: list[float | None]) -> list[list[float]]:
    """Means of the losses of positions 0, 1, 2 to 3, 4 to 7 and so on, each with the position
    before which it ends; none where positions have no loss, as tasks have.
    """
    if None in losses:
        return []
    ends = [*(2**n for n in range(len(losses).bit_length()) if 2**n < len(losses)), len(losses)]
    ranges = pairwise([0, *ends])
    return [[end, round(float(np.mean(losses[first:end])), 8)] for first, end in ranges]
