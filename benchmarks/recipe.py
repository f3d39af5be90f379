"""Trains a plan of runs one after the other, by the trainer itself, and compares what they reach.

    python benchmarks/recipe.py PLAN.yaml --output PATH [--seconds N] [section.key=value ...]

A plan has `common`, the options of all runs, and `runs`, for each name the options that differ;
overrides of the command line go before those of a run. Where a run names a configuration as its
`recipe`, it takes the optimizer and the initial mixing weights from there. `reference` names the
run whose final validation loss and time the others are compared with. Plans are in
benchmarks/plans.

Writes PATH.json after each run, and PATH.md and PATH.png at the end. A run that PATH.json has
with the same options is not repeated, so an interrupted plan goes on where it was. With --seconds
no run is begun that would end too late by the speed of those that PATH.json has. SIGTERM or SIGINT
ends the command, without the run that it stops. The exit status is 3 where a run is left. With
--shared other work runs on the same GPU: of such runs the report has the losses and not the times.
"""

import argparse
import gc
import json
import math
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from saving import origins
from transformers import PreTrainedModel

from mixer.common.errors import NotFinite, UserError, run_command
from mixer.common.files import write_text
from mixer.common.provenance import commit, hardware
from mixer.common.yaml_file import parse_yaml, read_yaml
from mixer.data.manifest import Manifest
from mixer.distributed.stop import Stop
from mixer.reporting.figure import COLOURS, name_ends, new_figure, save
from mixer.reporting.metrics_file import read_metrics, training_times
from mixer.training.config import RunConfig, load_config, override
from mixer.training.loop import train
from mixer.training.optim import OptimConfig, lags_lr

STARTING = 45.0  # seconds that a run takes beside training, with compilation
LEFT = 3  # exit status of a command that must be given again to do all
MOST_CURVES = 4  # that one picture shows


class Stopped(Exception):
    """A signal has ended a run before its last step."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", help="YAML file, see benchmarks/plans")
    parser.add_argument("--output", required=True, help="path of the results without ending")
    parser.add_argument("--only", nargs="+", default=[], help="names of runs; default: all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="how long all may take")
    parser.add_argument("--shared", action="store_true", help="the GPU has other work, too")
    parser.add_argument("--commit", default="", help="commit that is measured; default: git's")
    options, overrides = parser.parse_known_args()
    only, overrides = names_and_overrides(options.only, overrides)
    plan = read_yaml(options.plan)
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_name(output.name + ".json")
    result = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    result |= {"reference": plan.get("reference")}
    deadline = time.perf_counter() + options.seconds
    given = given_options(overrides)
    unknown = [name for name in only if name not in plan["runs"]]
    if unknown:
        raise UserError(f"--only {', '.join(unknown)}; allowed: {', '.join(plan['runs'])}")
    left, signals = [], note_signals()
    for name, changes in plan["runs"].items():
        settings = settings_of(plan["common"] | recipe(changes) | given | changes)
        known = result["runs"].get(name, {})
        if known.get("settings") == settings or (only and name not in only):
            continue
        if signals or time.perf_counter() + expected_seconds(settings, result) > deadline:
            left.append(name)
            continue
        measured_by = {"hardware": hardware(), "commit": options.commit or commit()}
        result |= {"command": shlex.join(["python", *sys.argv])} | measured_by
        about = {"settings": settings, "shared_gpu": options.shared} | measured_by
        try:
            measured = about | run(name, settings)
        except Stopped:
            left.append(name)
            continue
        require_same_text(measured, result["runs"], file)
        result["runs"][name] = measured
        print(f"{name}: {row(name, result)}", flush=True)
        write_text(file, json.dumps(result, indent=1) + "\n")
    if result["runs"]:
        report(result, output)
        print(table(result))
    if left:
        print(f"left {'after a signal' if signals else 'for lack of time'}: {', '.join(left)}")
        sys.exit(LEFT)


def note_signals() -> list[int]:
    """Has training note the signals that it answers, in a list that is empty yet: one that comes
    after a run's last step ends the command, and not the run.
    """
    noted, close = [], Stop.close

    def note_and_close(stop: Stop) -> None:
        if stop.number:
            noted.append(stop.number)
        close(stop)

    Stop.close = note_and_close
    return noted


def report(result: dict, output: Path) -> None:
    picture = output.with_name(output.name + ".png")
    plot(result, picture)
    text = table(result) + f"\n![The losses of these runs]({picture.name})\n"
    write_text(output.with_name(output.name + ".md"), text)


def expected_seconds(settings: dict, result: dict) -> float:
    """Of a run with these settings, by the slowest step of the runs that there are."""
    rows = [one for one in result["runs"].values() if "steps" in one]
    step = max((one["training_seconds"] / one["steps"] for one in rows), default=0.0)
    return STARTING + step * settings["train.steps"]


def names_and_overrides(names: list[str], overrides: list[str]) -> tuple[list[str], list[str]]:
    """Moves overrides that followed --only, which takes them for names, to the others."""
    moved = [name for name in names if "=" in name]
    return [name for name in names if name not in moved], overrides + moved


def given_options(overrides: list[str]) -> dict:
    """The options that the command line gives, by section.key."""
    wrong = [text for text in overrides if "=" not in text]
    if wrong:
        raise UserError(f"{' '.join(wrong)}: write overrides as section.key=value")
    given = dict(text.split("=", 1) for text in overrides)
    return {key: parse_yaml(value) if value else "" for key, value in given.items()}


def recipe(changes: dict) -> dict:
    """The options of the configuration that a run names as its recipe."""
    if "recipe" not in changes:
        return {}
    file = read_yaml(changes["recipe"])
    options = {f"optim.{name}": value for name, value in file["optim"].items()}
    return options | {"model.mixing_init": file["model"].get("mixing_init", "reference")}


def settings_of(options: dict) -> dict:
    """The settings of a run: the lags' rate is a number, also where it goes by the context."""
    settings = {key: value for key, value in options.items() if key != "recipe"}
    if settings.get("optim.shared_lags") and "optim.shared_lags_lr" not in settings:
        context = settings["model.max_position_embeddings"]
        settings["optim.shared_lags_lr"] = lags_lr(OptimConfig(shared_lags=True), context)
    return settings


def run(name: str, settings: dict) -> dict:
    """Trains in this process, in a directory that is thrown away; returns what the metrics say.

    Raises Stopped for a run that a signal has ended early.
    """
    with tempfile.TemporaryDirectory() as directory:
        given = [override(key, value) for key, value in settings.items()]
        given += [f"name={name}", f"output_dir={directory}"]
        given += ["checkpoint.save_every=0", "checkpoint.save_last=false"]
        config = load_config(None, given)
        try:
            train_here(config)
        except NotFinite as error:  # a run that diverges is a result, too
            return {"failure": str(error), "text_sha256": text_sha256(config)}
        lines = read_metrics(config.directory)
        shutil.rmtree(config.directory)
    if lines[-1]["step"] < config.train.steps:
        raise Stopped
    losses = {line["step"]: line for line in lines if line.get("loss") is not None}
    times = training_times(lines)
    last = max(losses)
    timed = [line for line in losses.values() if line["step"] > last // 2]
    return {
        "steps": last,
        "tokens": losses[last]["tokens"],
        "text_sha256": text_sha256(config),
        "tokens_per_second": sum(line["tokens_per_second"] for line in timed) / len(timed),
        "training_seconds": times[last],
        "peak_memory_gb": losses[last]["peak_memory_gb"],
        "skipped_steps": losses[last]["skipped_steps"],
        "validation": [
            [line["step"], line["validation_loss"]] for line in lines if "validation_loss" in line
        ],
        "loss": [[step, line["loss"]] for step, line in losses.items()],
        "grad_norm": [[step, line["grad_norm"]] for step, line in losses.items()],
        "largest_rise": largest_rise(
            [line["loss"] for line in losses.values() if line["step"] > config.optim.warmup_steps]
        ),
    }


def train_here(config: RunConfig) -> PreTrainedModel:
    """Trains as if no run had been in this process before; returns the model."""
    AcceleratorState._reset_state(True)
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        return train(config)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def text_sha256(config: RunConfig) -> list[str]:
    """Of the tokens that a run trains on, and of those that it is validated on."""
    return [split.tokens_sha256 for split in Manifest.load(config.data.directory).splits.values()]


def require_same_text(measured: dict, runs: dict[str, dict], file: Path) -> None:
    """Raises UserError if runs of `file` with the same options for data had another text."""

    def data(one: dict) -> dict:
        return {key: value for key, value in one["settings"].items() if key.startswith("data.")}

    text = measured.get("text_sha256")
    for name, other in runs.items():
        if text and other.get("text_sha256", text) != text and data(other) == data(measured):
            raise UserError(
                f"the text has changed: {file} has a run {name!r} with the same options for data, "
                "and other tokens. Runs are compared on one text alone: give that text, or another "
                "--output"
            )


def largest_rise(losses: list[float]) -> float:
    """By how much the training loss rose at most above the lowest of the steps before, relative."""
    rise, lowest = 0.0, float("inf")
    for loss in losses:
        lowest = min(lowest, loss)
        rise = max(rise, loss / lowest - 1)
    return rise


def row(name: str, result: dict) -> dict[str, str]:
    """One run in words; times are compared with those of the reference."""
    measured, reference = result["runs"][name], result["runs"].get(result["reference"] or "", {})
    if "failure" in measured:
        return {"run": name, "validation loss": f"failed: {measured['failure'].splitlines()[0]}"}
    validation = final_loss(measured)
    timed = not measured.get("shared_gpu")
    found = {
        "run": name,
        "steps": f"{measured['steps']:,}",
        "thousand tokens/s": f"{measured['tokens_per_second'] / 1e3:,.0f}" if timed else "",
        "training, s": f"{measured['training_seconds']:.1f}" if timed else "",
        "validation loss": f"{validation:.4f}",
        "largest rise of the loss": f"{measured['largest_rise']:.1%}",
        "largest gradient norm": f"{max(norm for _, norm in measured['grad_norm'] if norm):.1f}",
        "memory, GB": f"{measured['peak_memory_gb']:.1f}",
    }
    if "validation" in reference:
        found["loss to the reference's"] = f"{validation - final_loss(reference):+.4f}"
        timed = timed and not reference.get("shared_gpu")
        share = measured["training_seconds"] / reference["training_seconds"]
        found["of its time"] = f"{share:.3f}" if timed else ""
    return found


def table(result: dict) -> str:
    rows = [row(name, result) for name in result["runs"]]
    columns = list(dict.fromkeys(key for found in rows for key in found if found[key]))
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append("|---|" + "---:|" * (len(columns) - 1))
    lines += ["| " + " | ".join(found.get(key, "") for key in columns) + " |" for found in rows]
    return (
        "# Recipes compared\n\n"
        + "\n".join(lines)
        + "\n\nThe time is training alone, without start-up, evaluation and saving. A run's "
        "schedule ends at its last step. The rise is how far the logged training loss climbs after "
        "the warm-up above its lowest value before. Losses are in nats per token."
        + (" Runs without a time shared their GPU with other work." if shared(result) else "")
        + "\n\n"
        f"Measured on {origins(result)}. The options of each run are in the JSON file.\n"
    )


def shared(result: dict) -> bool:
    """Whether some run was not alone on its GPU."""
    return any(one.get("shared_gpu") for one in result["runs"].values())


def plot(result: dict, output: Path) -> None:
    """The losses of few runs as curves over time; where they end of more, which would cover each
    other, and of those whose times mean nothing.
    """
    shown = {name: one for name, one in result["runs"].items() if "loss" in one}
    if len(shown) > MOST_CURVES or shared(result):
        save(plot_ends(shown, result["reference"]), output)
    elif shown:
        save(plot_curves(shown), output)


def plot_curves(shown: dict):
    """Training loss against training time, and gradient norms against steps."""
    figure = new_figure(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2)
    losses, gradients = {}, {}
    for colour, (name, one) in zip(COLOURS, shown.items(), strict=False):
        style = {"color": colour, "linewidth": 1}
        end = (one["training_seconds"], final_loss(one), colour)
        left.plot([s * end[0] / one["steps"] for s, _ in one["loss"]], column(one["loss"]), **style)
        left.plot(*end[:2], "o", color=colour)
        losses[f"{end[1]:.3f} {name}"] = end
        norms = [(step, norm) for step, norm in one["grad_norm"] if norm]
        right.plot(*zip(*norms, strict=True), **style)
        gradients[name] = (*norms[-1], colour)
    left.set(xlabel="training time (s)", title="Training loss; dots: validation")
    left.set_ylabel("loss (nats per token)")
    right.set(xlabel="optimizer step", ylabel="norm", yscale="log")
    right.set_title("Gradient norm before clipping")
    name_ends(left, losses)
    name_ends(right, gradients)
    return figure


def column(pairs: list) -> list:
    return [value for _, value in pairs]


def plot_ends(shown: dict, reference: str | None):
    """The last validation loss of each run, the lowest at the top; a line at the reference's."""
    names = sorted(shown, key=lambda name: final_loss(shown[name]), reverse=True)
    figure = new_figure(figsize=(8, 1 + 0.28 * len(names)))
    axes = figure.subplots()
    for place, name in enumerate(names):
        loss = final_loss(shown[name])
        axes.plot(loss, place, "o", color=COLOURS[name == reference])
        beside = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{loss:.3f}", (loss, place), fontsize=9, **beside)
    if reference in shown:
        axes.axvline(final_loss(shown[reference]), color=COLOURS[1], alpha=0.4, zorder=0)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.margins(x=0.1)
    axes.set_xlabel("last validation loss (nats per token)")
    return figure


def final_loss(measured: dict) -> float:
    """The validation loss after the last step."""
    return measured["validation"][-1][1]


if __name__ == "__main__":
    run_command(main)
