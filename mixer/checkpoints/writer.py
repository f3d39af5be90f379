"""Writes the checkpoints of a run; checkpoint.py says what is in them."""

import itertools
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mixer.checkpoints.checkpoint import (
    FORMAT,
    OPTIMIZER,
    STATE,
    TRAINER,
    complete,
    link_best,
    prune,
)
from mixer.common.errors import NotFinite
from mixer.common.files import as_system_error, flush, remove
from mixer.distributed.world import World
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.reporting.text import METRICS


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, in a thread of the main process, which
    gathers the shards of the others.

    `save` returns when the state is copied to the host's memory. An error in the writing thread is
    raised by the next `save`, `wait` or `raise_failure`.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        keep_every: int,
        world: World,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        write_beside: Callable[[Path, PreTrainedConfig], None],
    ):
        self.directory = directory
        self.keep = keep
        self.keep_every = keep_every
        self.world = world
        self.model = model
        self.tokenizer = tokenizer
        self.write_beside = write_beside  # see Objective.write_beside
        self.copies: dict[str, Tensor] = {}  # of the state, in memory that each save uses again
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.jobs: list[Future] = []

    def save(self, optimizer: torch.optim.Optimizer, trainer: dict[str, Any]) -> None:
        """Starts to write the checkpoint of step trainer["step"]. All processes must call this
        together. Raises NotFinite, and writes nothing, if weights or optimizer state are not.
        """
        self.wait()  # until the last checkpoint is written
        state = saved_weights(self.model) | optimizer_state(self.model, optimizer)
        faulty = not_finite({name: local_part(tensor) for name, tensor in state.items()})
        names = list(itertools.chain.from_iterable(self.world.gather(faulty)))
        if names:
            raise NotFinite(
                f"after step {trainer['step']} the weights or the optimizer's state are not finite "
                f"({', '.join(names[:3])}...), so they are not saved. Lower optim.lr "
                "or raise optim.warmup_steps and run the same command again: it resumes from the "
                "last checkpoint"
            )
        self._copy(state)
        self._submit(self._write, {"format": FORMAT} | trainer)

    def link_best(self, validation_losses: dict[int, float]) -> None:
        """Links `best` to the best checkpoint, once the pending ones are written."""
        # A copy, because training adds losses while the thread reads them.
        self._submit(link_best, self.directory, dict(validation_losses), self.world.say)

    def raise_failure(self) -> None:
        """Raises OSError if the system has refused to write the last checkpoint. Waits for
        nothing.
        """
        while self.jobs and self.jobs[0].done():
            self.jobs.pop(0).result()

    def wait(self) -> None:
        """Waits until all is written. Raises OSError if the system refused to write it."""
        while self.jobs:
            self.jobs.pop(0).result()

    def close(self) -> None:
        """Ends the thread, which completes its checkpoint first; errors are not raised."""
        self.thread.shutdown(wait=True)

    def _submit(self, job, *arguments) -> None:
        if self.world.is_main:
            self.jobs.append(self.thread.submit(job, *arguments))

    @torch.no_grad()
    def _copy(self, state: dict[str, Tensor]) -> None:
        """Copies the state to the host's memory. All processes gather shards together, one tensor
        at a time: the state need not fit on one device.
        """
        on_gpu = self.world.device.type == "cuda"
        for name, tensor in state.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not self.world.is_main:
                continue
            if name not in self.copies:
                self.copies[name] = torch.empty(full.shape, dtype=full.dtype, pin_memory=on_gpu)
            self.copies[name].copy_(full, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    def _write(self, trainer: dict[str, Any]) -> None:
        """Writes one checkpoint, of the copies; runs in the thread."""
        final = self.directory / f"step-{trainer['step']}"
        partial = final.with_name(final.name + ".partial")
        try:
            (partial / STATE).mkdir(parents=True, exist_ok=True)
            optimizer = {name: copy for name, copy in self.copies.items() if "/" in name}
            save_file(optimizer, partial / OPTIMIZER)
            self._write_model(partial)
            (partial / TRAINER).write_text(json.dumps(trainer, indent=1))
            # The metrics up to a checkpoint's step are on the disk before the checkpoint is.
            flush(self.directory / METRICS)
            complete(partial, final)
        except BaseException as error:
            remove(partial)  # its space may be what is missing
            raise as_system_error(error) from error
        self.world.say(f"saved {final}")
        prune(self.directory, trainer["step"], self.keep, self.keep_every)

    def _write_model(self, directory: Path) -> None:
        """Writes what from_pretrained loads. save_pretrained would write the weights as they are
        now, and training has changed them since they were copied.
        """
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
        config.architectures = [model_class.__name__]  # pyright: ignore[reportAttributeAccessIssue]
        config.dtype = torch.float32
        if isinstance(config, MaskedMixerConfig):
            config.mixing_backend = "auto"  # a checkpoint of a GPU run loads on a machine without
        config.save_pretrained(directory)
        self.model.generation_config.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        weights = {name: copy for name, copy in self.copies.items() if "/" not in name}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        self.write_beside(directory, config)


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights and saved buffers by name, sharded under FSDP. A tied weight comes once."""
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as PARAMETER/KEY, sharded under FSDP except for scalars."""
    return {
        f"{name}/{key}": value
        for name, weight in model.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that hold NaN or infinity. Waits for the device."""
    return [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
