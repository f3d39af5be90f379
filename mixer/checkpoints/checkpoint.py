"""Checkpoints: directories that `from_pretrained` loads and training resumes from, complete or not
there at all.

    step-1000/
        config.json  model.safetensors  tokenizer.json ...    a from_pretrained directory, fp32
        modeling.py ...                                       its code, for where this package is not installed
        trainer_state/
            trainer.json                    step, position in the data, the data's settings and hashes, loss scale, wandb id
            optimizer-1-of-1.safetensors    AdamW's state; a file for each process where it is sharded
            random.safetensors              random state of each process
            files.json                      every file with its size and SHA-256; written last, it tells a complete checkpoint
    best -> step-800                        the checkpoint with the lowest validation loss

Everything is written to `step-1000.partial`, flushed to disk, then renamed. Older ones are deleted
only after that. Writing is in writer.py; this file knows the format, finds checkpoints and loads
them.
"""

import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from mixer.common.errors import UserError
from mixer.common.files import UMASK, flush, flush_tree
from mixer.common.options import option
from mixer.data.manifest import Manifest
from mixer.distributed.shards import as_held
from mixer.models.architecture import model_class

FORMAT = 2
TRAINER_FIELDS = {
    "step": int,
    "tokens": int,
    "data_directory": str,
}  # of trainer.json, what more than a resume reads


@dataclass
class CheckpointConfig:
    save_every: int = option(
        1000, "steps between checkpoints; 0 for one at the end alone", at_least=0
    )
    save_last: bool = option(True, "a checkpoint at the end; false for a run that is only timed")
    keep: int = option(2, "newest checkpoints to keep; the best one is kept too", at_least=2)
    keep_every: int = option(
        0, "also keep a checkpoint where this divides its step; 0 for none", at_least=0
    )
    resume: str = option(
        "auto", "auto (the run's newest complete checkpoint), never, or a directory to begin from"
    )
    allow_other_data: bool = option(
        False, "resume though the data or its tokenizer are not those of the checkpoint"
    )


# --- finding ----------------------------------------------------------------------------------------------------------


def find_resume(directory: Path, resume: str, say=print) -> Path | None:
    """The checkpoint to go on from, or None for a fresh start; see CheckpointConfig.resume. Its
    files are read and compared.

    Raises UserError for a named checkpoint that is incomplete, where none can be used, and where
    they would be in the way.
    """
    found = [
        path
        for path in sorted(directory.glob("step-*"), key=step_of, reverse=True)
        if step_of(path) >= 0
    ]
    if resume == "never":
        if found:
            raise UserError(
                f"checkpoint.resume = 'never', but {found[0]} exists; choose another name, delete {directory}, "
                "or set checkpoint.resume=auto"
            )
        return None
    elsewhere = resume != "auto" and Path(resume).resolve().parent != directory.resolve()
    if resume != "auto" and not (elsewhere and found):
        return _named(Path(resume), found)
    if elsewhere:
        say(f"{directory} has checkpoints of its own: going on from these, not from {resume}")
    for path in found:
        problem = damage(path)
        if problem is None:
            return path
        say(f"passing over {path}: {problem}")
    if found:  # starting afresh would overwrite them and the run's metrics
        raise UserError(
            f"{directory} has {len(found)} checkpoint(s), and none can be used; choose another name, give one with "
            f"checkpoint.resume, or delete {directory} to start afresh"
        )
    return None


def _named(path: Path, of_run: list[Path]) -> Path:
    problem = damage(path)
    if problem:
        raise UserError(
            f"checkpoint {path} cannot be used: {problem}; give another one, such as an earlier step-N beside it"
        )
    newer = [other for other in of_run if step_of(other) > step_of(path)]
    if newer:
        raise UserError(
            f"checkpoint.resume = {path}, but the run has newer ones, which checkpoint.resume=auto would take next time: "
            f"{', '.join(map(str, newer))}; delete these, or choose another name for a run that goes on from {path.name}"
        )
    return path


def incomplete(path: Path) -> str | None:
    """What is missing from a checkpoint directory, or cut short, or None."""
    if not path.is_dir():
        return "there is no such directory"
    listing = path / "trainer_state" / "files.json"
    if not listing.is_file():
        return "it is incomplete: trainer_state/files.json is missing"
    try:
        files = json.loads(listing.read_text())
        sizes = {name: known["size"] for name, known in files.items() if known["sha256"]}
    except (ValueError, TypeError, KeyError, AttributeError):
        return "it is damaged, or of an older format: trainer_state/files.json cannot be read"
    for name, size in sizes.items():
        if not (path / name).is_file():
            return f"it is incomplete: {name} is missing"
        if (path / name).stat().st_size != size:
            return f"it is damaged: {name} has {(path / name).stat().st_size} bytes, {size} were written"
    return None


def damage(path: Path) -> str | None:
    """`incomplete`, or which file's content is not what was written, or None."""
    problem = incomplete(path)
    if problem:
        return problem
    for name, known in json.loads((path / "trainer_state" / "files.json").read_text()).items():
        try:
            if sha256(path / name) != known["sha256"]:
                return f"it is damaged: {name} is not what was written (its SHA-256 differs)"
        except OSError as error:
            return f"it cannot be read: {error}"
    return None


def step_of(path: Path) -> int:
    """N of step-N, -1 for another name."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match.group(1)) if match else -1


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- loading ----------------------------------------------------------------------------------------------------------


def load_model(path: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The checkpoint's model with `config`'s backend; raises UserError where its shape is another
    one, naming each field.
    """
    saved = AutoConfig.from_pretrained(path, trust_remote_code=False)
    fields = [name for name in type(config)().to_dict() if hasattr(config, name)]
    if type(saved) is not type(config):
        fields = ["model_type"]
    ignored = {
        "mixing_backend",
        "mixing_init",
        "architectures",
        "dtype",
        "transformers_version",
        "_name_or_path",
    }
    differing = [
        f"{name} is {getattr(saved, name, None)} in the checkpoint and {getattr(config, name)} in the configuration"
        for name in fields
        if name not in ignored and getattr(saved, name, None) != getattr(config, name)
    ]
    if differing:
        raise UserError(
            f"checkpoint {path} is of another model: {'; '.join(differing)}; set these keys (model.*; model_type is "
            "model.architecture; vocab_size and eos_token_id come from data.*) to the checkpoint's values, or "
            "choose another name to start afresh"
        )
    return model_class(config).from_pretrained(path, config=config, dtype=torch.float32)


def read_trainer(path: Path) -> dict[str, Any]:
    """trainer.json of a checkpoint, empty where training has written none, as of a model from
    elsewhere.

    Raises UserError where it cannot be read or is not what training writes.
    """
    file = path / "trainer_state" / "trainer.json"
    if not file.is_file():
        return {}
    try:
        trainer = json.loads(file.read_text(encoding="utf-8"))
        wrong = [
            name for name, kind in TRAINER_FIELDS.items() if not isinstance(trainer[name], kind)
        ]
        problem = f"{', '.join(wrong)} of another type" if wrong else ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise UserError(
            f"{file} is damaged ({problem}): copy the checkpoint again, or give another one"
        )
    return trainer


def load_trainer(
    path: Path, data: dict[str, Any], allow_other_data: bool, say=print
) -> dict[str, Any]:
    """trainer.json of a checkpoint; raises UserError where it was trained on other data than `data`
    (see `identity`).
    """
    trainer = read_trainer(path)
    if trainer.get("format") != FORMAT:
        raise UserError(
            f"checkpoint {path} has format {trainer.get('format', 1)}, this code resumes {FORMAT}; it can be loaded "
            "and evaluated, but resume it with the version that wrote it, or choose another name to start afresh"
        )
    differing = data_differences(trainer["data"], data)
    if differing and not allow_other_data:
        raise UserError(
            f"checkpoint {path} was trained on other data or in another order:\n"
            + "".join(f"  {line}\n" for line in differing)
            + "restore that, choose another name to start afresh, or set checkpoint.allow_other_data=true to go on with this"
        )
    if differing:
        say("going on with other data than the checkpoint's: " + "; ".join(differing))
    return trainer


def identity(manifest: Manifest, seed: int) -> dict[str, Any]:
    """What tells one prepared data set and order of its samples from another, by the names that a
    person knows.
    """
    hashes = {f"{name}.bin": split.tokens_sha256 for name, split in manifest.splits.items()}
    settings = {f"data.{key}": value for key, value in manifest.settings.items()}
    return (
        settings
        | {"seed": seed, "tokenizer": manifest.tokenizer_sha256, "vocab_size": manifest.vocab_size}
        | hashes
    )


def data_differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key}: {_short(saved.get(key))} in the checkpoint, now {_short(now.get(key))}"
        for key in sorted(saved | now)
        if saved.get(key) != now.get(key)
    ]


def _short(value: Any) -> str:
    return (
        f"SHA-256 {value[:12]}"
        if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
        else repr(value)
    )


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """AdamW's state, whatever number of processes wrote it and reads it; one parameter at a time is
    put together.
    """
    files = [safe_open(file, "pt") for file in optimizer_files(path / "trainer_state")]
    held = [set(file.keys()) for file in files]
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            parts = [
                file.get_tensor(f"{name}/{key}")
                for file, names in zip(files, held, strict=True)
                if f"{name}/{key}" in names
            ]
            optimizer.state[parameter][key] = as_held(
                torch.cat(parts).reshape(parameter.shape), parameter
            )
        optimizer.state[parameter]["step"] = (
            files[0].get_tensor(f"{name}/step").to(parameter.device)
        )


def optimizer_files(state: Path) -> list[Path]:
    return sorted(
        state.glob("optimizer-*.safetensors"), key=lambda path: int(path.name.split("-")[1])
    )


def load_random_state(path: Path, accelerator: Accelerator) -> None:
    """This process's random state; where the run goes on with more processes, new ones keep their
    own.
    """
    states, rank = (
        load_file(path / "trainer_state" / "random.safetensors"),
        accelerator.process_index,
    )
    if f"cpu-{rank}" in states:
        torch.set_rng_state(states[f"cpu-{rank}"])
    if accelerator.device.type == "cuda" and f"cuda-{rank}" in states:
        torch.cuda.set_rng_state(states[f"cuda-{rank}"], accelerator.device)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


# --- completing and keeping -------------------------------------------------------------------------------------------


def complete(partial: Path, final: Path, say=print) -> None:
    """Lists, flushes and renames: from here on the checkpoint exists."""
    for file in partial.rglob("*.safetensors"):
        file.chmod(0o666 & ~UMASK)  # safetensors makes files for their owner alone
    files = {
        str(file.relative_to(partial)): {"size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    (partial / "trainer_state" / "files.json").write_text(json.dumps(files, indent=1))
    flush_tree(partial)
    if final.exists():  # a damaged one of the same step, passed over when the run resumed
        _remove(final, say)
    os.rename(partial, final)
    flush(final.parent)


def prune(directory: Path, keep: int, keep_every: int, say=print) -> None:
    """Deletes complete checkpoints but the newest `keep`, each `keep_every`-th step's, and the best
    one.
    """
    found = sorted(
        (p for p in directory.glob("step-*") if step_of(p) >= 0 and not incomplete(p)), key=step_of
    )
    best = (directory / "best").resolve()
    for path in found[:-keep]:
        if path.resolve() != best and not (keep_every and step_of(path) % keep_every == 0):
            _remove(path, say)


def link_best(directory: Path, validation_losses: dict[int, float], say=print) -> None:
    """Points `best` to the checkpoint with the lowest validation loss, of those there are, where
    the file system has links.
    """
    finite = {
        step: loss
        for step, loss in validation_losses.items()
        if loss is not None and math.isfinite(loss)
    }
    scored = [
        (loss, step) for step, loss in finite.items() if not incomplete(directory / f"step-{step}")
    ]
    if not scored:
        return
    best, partial = f"step-{min(scored)[1]}", directory / "best.partial"
    try:
        partial.unlink(missing_ok=True)
        partial.symlink_to(best)
        os.replace(partial, directory / "best")
    except OSError as error:
        say(
            f"{directory / 'best'} could not be linked to {best} ({error}), which is kept no longer than the others"
        )


def remove_partial(directory: Path, say=print) -> None:
    """Deletes what a killed save or deletion left behind."""
    for path in directory.glob("step-*.partial"):
        _delete(path, say)


def _remove(path: Path, say) -> None:
    """Renamed first, so that a killed deletion leaves no half checkpoint."""
    doomed = path.with_name(path.name + ".old.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    _delete(doomed, say)


def _delete(path: Path, say) -> None:
    """Where it cannot be done, as on NFS while another process reads a file of it, that is no
    reason to end a run.
    """
    try:
        if path.is_symlink():  # to where someone has moved a checkpoint, which stays there
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        say(f"{path} could not be deleted ({error}); the next start of the run tries again")
