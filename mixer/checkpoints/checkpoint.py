"""A run's checkpoints: directories that from_pretrained loads and training resumes from.

    step-1000/
        config.json  model.safetensors  tokenizer.json ...   what from_pretrained loads, in fp32
        modeling.py ...                   the model's code, for use without this package
        modules.json  1_Pooling/          what the objective adds, such as these of a contrastive
                                          run, for sentence-transformers
        trainer_state/
            trainer.json                  see below
            optimizer-1-of-1.safetensors  the optimizer's state, as PARAMETER/KEY for each parameter
                                          and key
            files.json                    size and SHA-256 of every file; written last
    best -> step-800                      the checkpoint with the lowest validation loss

trainer.json holds

    format                  FORMAT, which changes when older code cannot resume
    step, samples ...       how far the run is: Counters in mixer/training/start.py
    data_directory, data    where the data is, and what identifies it
    scaler, wandb_id        the fp16 loss scale, and the run's id at wandb
    settings, earlier       what the next steps train with; what steps up to N had instead
    mixing                  which backends model.mixing_backend=auto stood for in version 0.2.0

A checkpoint is complete or does not exist: everything is written to step-1000.partial, flushed to
disk, and renamed. Older checkpoints are deleted only after that. None holds a NaN or an infinity.
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mixer.common.errors import NotFinite, Say, UserError
from mixer.common.files import (
    as_path,
    as_system_error,
    flush,
    has_sha256,
    if_supported,
    publish,
    read_json,
    remove,
    sha256,
)
from mixer.common.terminal import counted
from mixer.common.values import shape_problem
from mixer.distributed.world import World
from mixer.models.auto import causal_class
from mixer.models.masked_mixer.configuration import MaskedMixerConfig

FORMAT = 2
STATE = "trainer_state"
TRAINER = f"{STATE}/trainer.json"
LISTING = f"{STATE}/files.json"
OPTIMIZER = f"{STATE}/optimizer-1-of-1.safetensors"
# Of trainer.json, which commands read beyond the numbers that each needs.
OF_TRAINER = {
    "settings": {"data": {str: object}, "train": {str: object}, str: object},
    "earlier": {str: {str: object}},
    str: object,
}
REMEDY = "copy the checkpoint again, or give another one"
# Files that nothing loads, and that may be added to a checkpoint.
UNREAD = re.compile(r"(.*/)?\..*|.*\.(md|pyc)")


# ------------------------------------------------------------------------- on the disk


def step_of(path: Path) -> int:
    """N of step-N, -1 for another name."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match.group(1)) if match else -1


def all_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run by step, also damaged ones."""
    return sorted((p for p in directory.glob("step-*") if step_of(p) >= 0), key=step_of)


def read_trainer(checkpoint: Path, **needed: Any) -> dict[str, Any]:
    """The content of trainer.json; empty for a model from elsewhere. Raises UserError if it cannot
    be read, or lacks what every command or the caller needs, of these types.
    """
    file = checkpoint / TRAINER
    if not file.is_file():
        return {}
    needed |= {"step": int, "tokens": int, "data_directory": str}
    values = read_json(file, REMEDY, required=needed)
    if problem := shape_problem(values, OF_TRAINER, TRAINER):
        raise UserError(f"{file} is damaged ({problem}): {REMEDY}")
    return values


def damage(checkpoint: Path, for_resume: bool = True) -> str | None:
    """What is wrong with a checkpoint: a file is missing, changed or added. None if it is intact.
    for_resume: False leaves out what only a resume loads.
    """
    if not checkpoint.is_dir():
        return "there is no such directory"
    try:
        listing = read_json(checkpoint / LISTING, REMEDY)
        for name, entry in listing.items():
            is_read = for_resume or name == TRAINER or not name.startswith(f"{STATE}/")
            if is_read and not has_sha256(checkpoint / name, entry["sha256"]):
                return f"{name} is not what was written (its SHA-256 differs)"
    except UserError as error:
        return str(error)
    except (KeyError, TypeError, ValueError):
        return f"{LISTING} is damaged: {name!r} is {entry!r:.60}"
    except OSError as error:
        return f"{name} cannot be read ({error})"
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    names = {str(file.relative_to(checkpoint)) for file in files}
    added = [name for name in names - {LISTING, *listing} if not UNREAD.fullmatch(name)]
    return f"{min(added)} was added, which may change what is loaded" if added else None


def find_resume(directory: Path, resume: str, say: Say = print) -> Path | None:
    """The checkpoint to continue from: the newest good one of the run, or the one that `resume`
    names where it is not "auto". None for a fresh start.

    Raises UserError if the run has newer checkpoints than the named one, and if none can be used.
    """
    candidates = all_checkpoints(directory)[::-1]  # the newest first
    named = as_path(resume)
    if resume != "auto" and candidates and named.resolve().parent != directory.resolve():
        say(f"{directory} has checkpoints of its own: continuing from these, not from {resume}")
    elif resume != "auto":
        if inside := all_checkpoints(named):
            raise UserError(
                f"checkpoint.resume = {resume} is a run, not a checkpoint: give {inside[-1]}"
            )
        step = step_of(named.resolve())  # of `best`, that of the checkpoint which it links to
        if newer := [str(path) for path in candidates if step_of(path) > step]:
            raise UserError(
                f"checkpoint.resume = {resume}, but the run has newer ones: {', '.join(newer)}; "
                "delete these, or choose another name to branch from there"
            )
        candidates = [named]
    for path in candidates:
        problem = damage(path)
        if problem is None:
            return path
        say(f"skipping {path}: {problem}")
    if candidates:  # a fresh start would overwrite them and the run's metrics
        raise UserError(
            f"none of {counted(len(candidates), 'checkpoint')} can be used ({path}: {problem}); "
            "give another checkpoint.resume, or choose another name to start afresh"
        )
    return None


def complete(partial: Path, final: Path) -> None:
    """Lists the files of a checkpoint, and renames it once all of it is on disk."""
    files = {
        str(file.relative_to(partial)): {"size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    (partial / LISTING).write_text(json.dumps(files, indent=1))
    if final.exists():  # a damaged checkpoint of the same step, which resuming passed over
        _remove(final)
    publish(partial, final)


def prune(directory: Path, last: int, keep: int, keep_every: int) -> None:
    """Deletes checkpoints up to step `last`, except the newest `keep`, every `keep_every` steps,
    and the best one. Later ones, which a resume has passed over, stay.
    """
    best = (directory / "best").resolve()
    saved = [path for path in all_checkpoints(directory) if step_of(path) <= last]
    for path in saved[:-keep]:
        is_best = path.resolve() == best
        is_spared = keep_every > 0 and step_of(path) % keep_every == 0
        if not is_best and not is_spared:
            _remove(path)


def link_best(
    directory: Path, validation_losses: dict[int, float | None], say: Say = print
) -> None:
    """Links `best` to the checkpoint with the lowest validation loss, if there is one. A folder of
    that name, which a copy of a run has if links were followed, is renamed.

    validation_losses: by step; None or NaN where the loss was not finite.
    """
    losses = {}
    for path in all_checkpoints(directory):
        loss = validation_losses.get(step_of(path))
        if loss is not None and isfinite(loss):
            losses[path.name] = loss
    if not losses:
        return
    best = min(losses, key=losses.get)
    link = directory / "best"
    partial = directory / "best.partial"
    remove(partial)
    otherwise = f"there is no {link}, and {best} is kept no longer than the others"
    if if_supported(otherwise, os.symlink, best, partial):
        if link.is_dir() and not link.is_symlink():
            names = (directory / f"best-copy-{number}" for number in itertools.count(1))
            aside = next(path for path in names if not os.path.lexists(path))
            os.rename(link, aside)
            say(f"{link} was a folder, and is {aside} now: training links it to {best}")
        os.replace(partial, link)


def remove_partial(directory: Path) -> None:
    """Deletes what a killed save or deletion has left behind."""
    for path in directory.glob("step-*.partial"):
        remove(path)


def _remove(checkpoint: Path) -> None:
    """Deletes a checkpoint. It is renamed first, so that a kill leaves no half of it. Files that
    cannot be deleted, as on NFS while another process reads them, go at the run's next start.
    """
    doomed = checkpoint.with_name(checkpoint.name + ".old.partial")
    remove(doomed)
    os.rename(checkpoint, doomed)
    remove(doomed)


# ------------------------------------------------------------------------- written by a run


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, in a thread of the main process, which
    gathers the shards of the others.

    `save` returns when the state is copied to the host's memory. An error in the writing thread is
    raised by the next call.
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
            flush(self.directory / "metrics.jsonl")
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
        config.architectures = [causal_class(config).__name__]
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
