"""One run of a plan: it trains, and measures."""

import shutil
import signal
from pathlib import Path
from statistics import median

from mixer.common.errors import NotFinite, UserError, say_on_stderr
from mixer.common.hardware import hardware
from mixer.comparison.plan import SIGNALS, Run
from mixer.reporting.text import METRICS, readable_lines
from mixer.training.config import RunConfig, load_config
from mixer.training.loop import train
from mixer.training.metrics import useful_flops

POINTS = 60  # of a curve of the results, at most


def train_run(run: Run, folder: Path, recorded: list[str] | None) -> dict | None:
    """What a run measures; None if a signal has stopped it, and it was saved. Raises UserError for
    another text than the recorded one, if there is one.
    """
    config = run.config(
        f"name={run.folder}",
        f"output_dir={folder}",
        "train.eval_every=0",
        "checkpoint.save_every=0",
        f"checkpoint.save_last={str(run.keeps_checkpoint).lower()}",
    )
    saved = config.directory / "config.yaml"
    if saved.exists() and load_config(str(saved), []) != config:  # of other options
        shutil.rmtree(config.directory)
    data = config.build_objective().open_data()
    text = [split.tokens_sha256 for split in data.manifest.splits.values()]
    if recorded not in (None, text):
        problem = f"{config.data.directory or config.data.source} has other tokens than the results"
        raise UserError(f"{problem}: restore the text, or give another --output")
    row = run.identity | {"settings": run.settings, "hardware": hardware(), "text_sha256": text}
    try:
        model = train(config)
    except NotFinite as error:  # a run that diverges is a result, too
        row["failure"] = str(error)
    else:
        for number in SIGNALS:  # what is left takes seconds
            signal.signal(number, signal.SIG_IGN)
        lines = [line for _, line in readable_lines(config.directory / METRICS, say_on_stderr)]
        if not lines or lines[-1]["step"] < config.train.steps:
            return None
        row |= measured(lines, config, len(data.training), run.identity.get("budget") == 0)
        row["parameters"] = model.num_parameters()
        if (flops := useful_flops(model, config)) is not None:
            row["useful_tflops"] = flops * row["tokens_per_second"] / 1e12
    if run.keeps_checkpoint and "failure" not in row:
        row["checkpoint"] = str(config.directory / f"step-{config.train.steps}")
    else:
        shutil.rmtree(config.directory)
    return row


def measured(lines: list[dict], config: RunConfig, samples: int, is_speed: bool) -> dict:
    """What the metrics of a run say. samples: of its training data."""
    windows = [line for line in lines if "loss" in line]
    last = windows[-1]
    validation = [line for line in lines if "validation_loss" in line][-1]
    # Starts slow the first window, and in a short run those of other processes slow all but one.
    # Of a window in which a run has gone on, `seconds` are those since then.
    rates = [window["tokens_per_second"] for window in windows[1:] or windows]
    tokens_per_second = max(rates) if is_speed else median(rates)
    # In samples: tokens count padding where texts are padded, as pairs are.
    samples_a_step = config.train.batch_size * config.train.gradient_accumulation_steps
    passes = last["step"] * samples_a_step / samples
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_a_step": last["tokens"] // last["step"],
        "tokens_per_second": tokens_per_second,
        "training_seconds": last["tokens"] / tokens_per_second,
        "training_tokens": round(last["tokens"] / passes),  # of one pass, counted as `tokens` are
        "passes": passes,
        "peak_memory_gb": last["peak_memory_gb"],
        "validation_loss": validation["validation_loss"],
        "accuracy": validation.get("validation_accuracy"),
        "bits_per_byte": validation.get("validation_bits_per_byte"),
        "loss": [[line["step"], line["loss"]] for line in windows[:: len(windows) // POINTS + 1]],
        **{name: validation[name] for name in validation if name.startswith("top1_of_")},
    }
