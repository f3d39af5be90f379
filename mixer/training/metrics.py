"""The metrics of a run: how fast it is, and the lines of metrics.jsonl, copied to wandb or
TensorBoard if asked for.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from transformers import PreTrainedModel

from mixer.common.errors import first_line
from mixer.common.files import write_text
from mixer.common.hardware import peak_memory_gb, peak_tflops
from mixer.distributed.world import World
from mixer.models.architecture import flops_per_token
from mixer.reporting.text import METRICS, readable_lines
from mixer.training.config import RunConfig


def useful_flops(model: PreTrainedModel, run: RunConfig) -> float | None:
    """Of a training step per token; without an output layer where nothing reads its logits. None
    if they are not known (see flops_per_token).
    """
    output = model.get_output_embeddings()
    assert output is not None
    unread = output.weight.numel() * (not run.build_objective().reads_logits)
    flops = flops_per_token(model, run.model.max_position_embeddings)
    return None if flops is None else flops["useful"] - 6.0 * unread


class Timer:
    """Wall time between two lines of metrics, without evaluation and the writing of checkpoints."""

    def __init__(self, tokens: int):
        """tokens: trained on so far."""
        self._begin(tokens)

    def _begin(self, tokens: int) -> None:
        self.tokens = tokens
        self.started = time.perf_counter()
        self.seconds = {"waiting": 0.0, "paused": 0.0}

    @contextmanager
    def count(self, activity: str) -> Iterator[None]:
        """Counts the time inside as "waiting" for data, or as "paused", which is no training."""
        began = time.perf_counter()
        yield
        self.seconds[activity] += time.perf_counter() - began

    def lap(
        self, tokens: int, flops_per_token: float | None, world: World, precision: str
    ) -> dict[str, float]:
        """Since the last lap: the throughput of all processes, with useful TFLOP/s and their share
        of the devices' peak if these are known, and the share of time that this process waited for
        data. Waits for the device. tokens: trained on so far by all processes, without padding.
        """
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.started - self.seconds["paused"]
        rate = (tokens - self.tokens) / seconds
        line = {"tokens_per_second": rate}
        if flops_per_token is not None:
            line["useful_tflops"] = rate * flops_per_token / 1e12
            if peak := peak_tflops(world.device, precision):
                line["peak_share"] = line["useful_tflops"] / (peak * world.size)
        line |= {"seconds": seconds, "data_wait_share": self.seconds["waiting"] / seconds}
        line["peak_memory_gb"] = peak_memory_gb(world.device)
        self._begin(tokens)
        return line


class Metrics:
    """Writes the metrics of a run that stands at `step`; only the main process has one.

    Lines that a killed run wrote after its checkpoint of `step` are removed, so that the file has
    each step once, and so are the scores of `step` itself if the run `evaluates_again`. The tracker
    gets the lines that it lacks: wandb's own process may have lost some with the kill.

    wandb_id: of the run at wandb, where it goes on there.
    """

    def __init__(self, run: RunConfig, step: int, evaluates_again: bool, wandb_id: str | None):
        path = run.directory / METRICS
        self.name = run.logging.tracker
        # By step, those of as many targets or pairs as the last: others are not to be compared.
        self.validation_losses: dict[int, float] = {}
        self.validation_size: int | None = None
        self.tracker = self._try(lambda: _start_tracker(run, wandb_id))
        wandb = self.tracker.tracker if self.tracker and self.name == "wandb" else None
        self.wandb_id = wandb.id if wandb else wandb_id
        self.tracked = wandb.step if wandb else 0  # the tracker has the lines of earlier steps
        texts = []
        for text, line in readable_lines(path, print) if path.exists() else ():
            comes_again = evaluates_again and "validation_loss" in line
            if line["step"] < step or (line["step"] == step and not comes_again):
                texts.append(text + "\n")
                self._note(line)
        write_text(path, "".join(texts))
        self.file = open(path, "a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line, which has at least the key "step". Numbers that are not finite become
        null, as JSON has no others.
        """
        self.file.write(json.dumps({key: in_json(value) for key, value in line.items()}) + "\n")
        self.file.flush()
        self._note(line)

    def close(self) -> None:
        self.file.close()
        if self.tracker:
            self._try(self.tracker.finish)

    def _note(self, line: dict[str, Any]) -> None:
        if "validation_loss" in line:
            size = line.get("validation_tokens", line.get("validation_pairs"))
            if size != self.validation_size:  # of another train.eval_samples
                self.validation_losses = {}
            self.validation_size = size
            self.validation_losses[line["step"]] = line["validation_loss"]
        if (tracker := self.tracker) and line["step"] >= self.tracked:
            values = {key: value for key, value in line.items() if key != "step"}
            self._try(lambda: tracker.log(values, step=line["step"]))

    def _try(self, call: Callable[[], Any]) -> Any:
        """Calls the tracker, and stops using it if that fails: it may not be installed, nobody may
        be logged in, and wandb has a process of its own, which dies if the whole job gets a signal.
        """
        try:
            return call()
        except Exception as error:
            self.tracker = None
            remedy = "WANDB_MODE=offline needs no network, " if self.name == "wandb" else ""
            remedy += f"pip install {self.name}"
            failure = f"{self.name} has failed, the run continues without it: {first_line(error)}"
            print(f"{failure}; a resume sends it all lines of metrics.jsonl ({remedy})", flush=True)
            if isinstance(error, ConnectionError):
                # Otherwise wandb tries again when Python exits, and prints a traceback.
                import wandb

                with suppress(ConnectionError):
                    wandb.teardown()


def _start_tracker(run: RunConfig, wandb_id: str | None) -> GeneralTracker | None:
    """What logging.tracker names; None for "none". wandb_id: of the run at wandb, to go on with."""
    name = run.logging.tracker
    if name == "none":
        return None
    if name == "tensorboard":  # written anew, so that each line is there once
        shutil.rmtree(run.directory / name, ignore_errors=True)
        tracker = TensorBoardTracker(name, run.directory)
    else:
        tracker = WandBTracker(
            run.logging.wandb_project,
            name=run.name,
            dir=run.directory,
            config=asdict(run),
            id=wandb_id,
            resume="allow" if wandb_id else None,
        )
    tracker.start()
    return tracker


def in_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(line: dict[str, Any], steps: int) -> str:
    """A line of metrics of a run of `steps` steps, for people, in columns. `norm` is the
    gradient's.
    """
    step = line["step"]
    rate = line["tokens_per_second"]
    entries = [
        f"loss {line['loss']:.4f}",
        f"lr {line['lr']:.1e}",
        f"norm {line['grad_norm']:6.3f}",
    ]
    if line["skipped_steps"]:
        entries.append(f"{line['skipped_steps']} skipped")
    if "loss_scale" in line:
        entries.append(f"loss scale {line['loss_scale']:.0f}")
    left = timedelta(seconds=round(line["tokens"] / step * (steps - step) / rate))
    listed = ", ".join(entries)
    return f"step {step:{len(str(steps))}}/{steps}: {listed}, {rate:9,.0f} tokens/s, {left} left"
