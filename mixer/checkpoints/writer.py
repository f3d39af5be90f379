"""Writing checkpoints beside training: copies of the state, taken while the GPU works on, and a
thread that writes them.
"""

import json
import os
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mixer.checkpoints import checkpoint
from mixer.checkpoints.checkpoint import CheckpointConfig
from mixer.common.errors import UserError
from mixer.common.files import flush
from mixer.distributed.hosts import Hosts
from mixer.distributed.shards import local_part, whole
from mixer.models.carried_code import write_code
from mixer.models.masked_mixer.configuration import MaskedMixerConfig

OTHERS_SECONDS = 1800.0  # to wait for the files of other processes


class HostCopy:
    """Copies of tensors in memory of the host, in buffers that are used again by the next copy.

    On a GPU the buffers are pinned and the copies run on a stream of their own, beside the work
    queued there: what will change the tensors must be queued after `before_change`, and what reads
    the copies after `wait`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: dict[str, Tensor] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.done = None

    def reserve(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if name not in self.buffers:
            self.buffers[name] = torch.empty(shape, dtype=dtype, pin_memory=self.stream is not None)
        return self.buffers[name]

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self.reserve(name, tensor.shape, tensor.dtype)
        if self.stream is None:
            return buffer.copy_(tensor.detach())
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            buffer.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self.stream)
            self.done = self.stream.record_event()
        return buffer

    def before_change(self) -> None:
        """Lets the GPU, not this process, wait for the copies."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class CheckpointWriter:
    """Takes and writes the checkpoints of a run, from all processes together, one at a time.

    `save` returns when the state is copied (on a GPU: when copying is queued); `check` raises what
    the writing thread met, and so do the next `save` and `close`, which wait for it.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        accelerator: Accelerator,
        hosts: Hosts,
        model,
        tokenizer,
        say,
    ):
        self.directory, self.config, self.accelerator, self.hosts = (
            directory,
            config,
            accelerator,
            hosts,
        )
        self.model: PreTrainedModel = model
        self.tokenizer, self.say = tokenizer, say
        self.main = accelerator.is_main_process
        self.sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self.host = HostCopy(accelerator.device)
        own = (torch.cuda.current_device() if self.host.stream is not None else None,)
        self.thread = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_after_training, initargs=own
        )
        self.jobs: list[Future] = []
        self.abandoned = threading.Event()
        self._reserve()

    def save(self, optimizer: torch.optim.Optimizer, trainer: dict[str, Any]) -> None:
        """Begins to write step-N, N = trainer["step"]."""
        self.wait()  # for the buffers
        model, state = self._copy_model(), self._copy_optimizer(optimizer)
        random = self.hosts.gather(checkpoint.random_state(self.accelerator.device))
        trainer = {"format": checkpoint.FORMAT} | trainer
        if self.main or self.sharded:
            self._submit(self._write, model, state, random, trainer)

    def link_best(self, validation_losses: dict[int, float]) -> None:
        """Points `best` to the best checkpoint there is, when those before are written."""
        if self.main:
            self._submit(checkpoint.link_best, self.directory, validation_losses, self.say)

    def check(self) -> None:
        """Raises UserError if writing has failed."""
        while self.jobs and self.jobs[0].done():
            self._finish(self.jobs.pop(0))

    def wait(self) -> None:
        """`check`, when all is written."""
        while self.jobs:
            self._finish(self.jobs.pop(0))

    def close(self) -> None:
        self.wait()
        self.thread.shutdown()

    def abandon(self) -> None:
        """For a run that has failed: what can be completed without other processes is, errors are
        not raised.
        """
        self.abandoned.set()
        self.thread.shutdown(wait=True)

    def before_update(self) -> None:
        """To be called before the optimizer changes what is being copied."""
        self.host.before_change()

    def _submit(self, job, *arguments) -> None:
        self.jobs.append(self.thread.submit(job, *arguments))

    def _finish(self, job: Future) -> None:
        try:
            job.result()
        except OSError as error:
            kept = [path for path in self.directory.glob("step-*") if checkpoint.step_of(path) >= 0]
            good = [
                path
                for path in sorted(kept, key=checkpoint.step_of)
                if not checkpoint.incomplete(path)
            ]
            after = (
                f"the run can go on from {good[-1]}"
                if good
                else "no checkpoint of the run is complete"
            )
            raise UserError(
                f"a checkpoint could not be written to {self.directory}: {error}; {after}: make space or give access there, then "
                "give the same command again"
            ) from error

    def _reserve(self) -> None:
        """Pinning memory takes seconds for a large model: before training, not in the step of the
        first checkpoint.
        """
        for name, parameter in self.model.named_parameters():
            if self.main:
                self.host.reserve(name, parameter.shape, parameter.dtype)
            if self.main or self.sharded:
                for key in ("exp_avg", "exp_avg_sq"):
                    self.host.reserve(f"{name}/{key}", local_part(parameter).shape, parameter.dtype)
                self.host.reserve(f"{name}/step", torch.Size(), torch.float32)

    def _copy_model(self) -> dict[str, Tensor]:
        copies = {}
        for name, parameter in self.model.named_parameters():  # a tied weight comes once
            full = whole(parameter)  # one at a time: sharded, the model need not fit on one device
            if self.main:
                copies[name] = self.host.copy(name, full)
        return copies

    def _copy_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        if not (self.main or self.sharded):
            return {}
        return {
            f"{name}/{key}": self.host.copy(f"{name}/{key}", local_part(value))
            for name, parameter in self.model.named_parameters()
            for key, value in optimizer.state[parameter].items()
            if local_part(value).numel()
        }

    def _write(
        self, model: dict, optimizer: dict, random: list[dict], trainer: dict[str, Any]
    ) -> None:
        """What the thread does."""
        self.host.wait()
        final = self.directory / f"step-{trainer['step']}"
        partial = final.with_name(final.name + ".partial")
        try:
            if self.main:
                (partial / "trainer_state").mkdir(parents=True)
            self._write_optimizer(partial / "trainer_state", optimizer)
            if not self.main:
                return
            _write_model(partial, self.model, model, self.tokenizer)
            states = {
                f"{kind}-{rank}": state
                for rank, states in enumerate(random)
                for kind, state in states.items()
            }
            save_file(states, partial / "trainer_state" / "random.safetensors")
            (partial / "trainer_state" / "trainer.json").write_text(json.dumps(trainer, indent=1))
            self._wait_for(
                lambda: len(checkpoint.optimizer_files(partial / "trainer_state")) == self._files()
            )
            flush(
                self.directory / "metrics.jsonl"
            )  # a checkpoint's lines are on the disk before it is
            checkpoint.complete(partial, final, self.say)
        except BaseException as error:
            if self.main:
                shutil.rmtree(partial, ignore_errors=True)  # its space may be what is missing
            raise _as_os_error(error) from error
        self.say(f"saved {final}")
        checkpoint.prune(self.directory, self.config.keep, self.config.keep_every, self.say)

    def _files(self) -> int:
        return self.hosts.processes if self.sharded else 1

    def _write_optimizer(self, state: Path, optimizer: dict[str, Tensor]) -> None:
        """Under its name only when whole, which is what the main process waits for."""
        self._wait_for(state.is_dir)
        file = (
            state
            / f"optimizer-{self.hosts.rank + 1 if self.sharded else 1}-of-{self._files()}.safetensors"
        )
        save_file(optimizer, file.with_suffix(".partial"))
        flush(file.with_suffix(".partial"))
        os.rename(file.with_suffix(".partial"), file)

    def _wait_for(self, condition) -> None:
        deadline = time.monotonic() + OTHERS_SECONDS
        while not condition():
            if self.abandoned.is_set() or time.monotonic() > deadline:
                raise OSError(
                    "files of other processes did not appear; output_dir must be one directory for all hosts"
                )
            time.sleep(0.01)


def _after_training(device: int | None) -> None:
    """Lets this thread have what training leaves of the processors. It begins with GPU 0, whichever
    its process works on.
    """
    if device is not None:
        torch.cuda.set_device(device)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _write_model(
    directory: Path, model: PreTrainedModel, weights: dict[str, Tensor], tokenizer
) -> None:
    """What from_pretrained loads; not by save_pretrained, which would read the weights that
    training changes meanwhile.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures, config.dtype = (
        [AutoModelForCausalLM._model_mapping[type(config)].__name__],
        torch.float32,
    )
    if isinstance(config, MaskedMixerConfig):
        config.mixing_backend = "auto"  # a checkpoint of a GPU run loads on a machine without one
        write_code(directory)
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _as_os_error(error: BaseException) -> BaseException:
    """safetensors wraps the system's errors in its own."""
    of_system = isinstance(error, SafetensorError) and (
        "I/O" in str(error) or "os error" in str(error)
    )
    return OSError(str(error)) if of_system else error
