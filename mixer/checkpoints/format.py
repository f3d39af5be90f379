"""The format of checkpoints: directories that from_pretrained loads and training resumes from.

    step-1000/
        config.json  model.safetensors  tokenizer.json ...   what from_pretrained loads, in fp32
        modeling.py ...                   the model's code, for use without this package
        trainer_state/
            trainer.json                  see below
            optimizer-1-of-1.safetensors  the optimizer's state, as PARAMETER/KEY for each parameter
                                          and key; earlier versions wrote several files, of shards
            files.json                    size and SHA-256 of every file; written last
    best -> step-800                      the checkpoint with the lowest validation loss

trainer.json holds

    format                                    FORMAT, which changes when older code cannot resume
    step, samples, tokens, skipped_steps      how far the run is; samples is its place in the data
    data_directory, data                      where the data is, and what identifies it
    logged_tokens, nats                       tokens at the last line of metrics, and the sum of
                                              the nats since then
    scaler, wandb_id                          the fp16 loss scale, and the run's id at wandb
    settings, earlier                         what the next steps train with, and what the steps up
                                              to others had in place of it
    mixing                                    what model.mixing_backend=auto stands for where a
                                              race decided it

A checkpoint is complete or does not exist: everything is written to step-1000.partial, flushed to
disk, and renamed. Older checkpoints are deleted only after that.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mixer.common.errors import Say, UserError
from mixer.common.files import has_sha256, if_supported, publish, read_json, sha256

FORMAT = 2
STATE = "trainer_state"
TRAINER = f"{STATE}/trainer.json"
LISTING = f"{STATE}/files.json"
OPTIMIZER = f"{STATE}/optimizer-1-of-1.safetensors"
# Entries of trainer.json that every command reads, and those that only a resume needs.
READ = {"step": int, "tokens": int, "data_directory": str}
RESUMED = {"samples": int, "skipped_steps": int, "data": dict}
RESUMED |= {"scaler": dict | None, "wandb_id": str | None}
REMEDY = "copy the checkpoint again, or give another one"
# Files that nothing loads, and that may be added to a checkpoint.
UNREAD = re.compile(r"(.*/)?\..*|.*\.(md|pyc)")


def step_of(path: Path) -> int:
    """N of step-N, -1 for another name."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match.group(1)) if match else -1


def all_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run by step, also damaged ones."""
    return sorted((p for p in directory.glob("step-*") if step_of(p) >= 0), key=step_of)


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """The content of trainer.json; empty for a model from elsewhere. Raises UserError if it cannot
    be read, or lacks what training writes.
    """
    file = checkpoint / TRAINER
    return read_json(file, REMEDY, required=READ) if file.is_file() else {}


def earlier_settings(
    earlier: dict[str, dict[str, Any]], left_out: Collection[str] = ()
) -> list[str]:
    """A line for each change of settings in a run, from trainer.json."""
    shown = {
        step: ", ".join(f"{key} = {changed[key]}" for key in changed if key not in left_out)
        for step, changed in earlier.items()
    }
    return [f"Until step {step}: {settings}" for step, settings in shown.items() if settings]


def damage(checkpoint: Path, whole: bool = True) -> str | None:
    """What is wrong with a checkpoint: a file is missing, changed or added. None if it is intact.
    whole: False leaves out what only a resume loads.
    """
    if not checkpoint.is_dir():
        return "there is no such directory"
    try:
        listing = read_json(checkpoint / LISTING, REMEDY)
        for name, known in listing.items():
            is_read = whole or name == TRAINER or not name.startswith(f"{STATE}/")
            if is_read and not has_sha256(checkpoint / name, known["sha256"]):
                return f"{name} is not what was written (its SHA-256 differs)"
    except UserError as error:
        return str(error)
    except (KeyError, TypeError, ValueError):
        return f"{LISTING} is damaged: {name!r} is {known!r:.60}"
    except OSError as error:
        return f"{name} cannot be read ({error})"
    found = {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()}
    added = [name for name in found - {LISTING, *listing} if not UNREAD.fullmatch(name)]
    return f"{min(added)} was added, which may change what is loaded" if added else None


def find_resume(directory: Path, resume: str, say: Say = print) -> Path | None:
    """The checkpoint to continue from: the newest good one of the run, or the one that `resume`
    names where it is not "auto". None for a fresh start.

    Raises UserError if the run has newer checkpoints than the named one, and if none can be used.
    """
    candidates, named = all_checkpoints(directory)[::-1], Path(resume)  # the newest first
    if resume != "auto" and candidates and named.resolve().parent != directory.resolve():
        say(f"{directory} has checkpoints of its own: going on from these, not from {resume}")
    elif resume != "auto":
        step = step_of(named.resolve())  # of `best`, that of the checkpoint which it links to
        if newer := [str(path) for path in candidates if step_of(path) > step]:
            raise UserError(
                f"checkpoint.resume = {resume}, but the run has newer ones: {', '.join(newer)}; "
                "delete these, or choose another name for a run that goes on from there"
            )
        candidates = [named]
    for path in candidates:
        problem = damage(path)
        if problem is None:
            return path
        say(f"passing over {path}: {problem}")
    if candidates:  # a fresh start would overwrite them and the run's metrics
        raise UserError(
            f"none of {len(candidates)} checkpoint(s) can be used ({path}: {problem}); give "
            "another checkpoint.resume, or choose another name to start afresh"
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
    for path in [path for path in all_checkpoints(directory) if step_of(path) <= last][:-keep]:
        if path.resolve() != best and not (keep_every and step_of(path) % keep_every == 0):
            _remove(path)


def link_best(directory: Path, validation_losses: dict[int, float | None]) -> None:
    """Links `best` to the checkpoint with the lowest validation loss, if there is one.

    validation_losses: by step; None or NaN where the loss was not finite.
    """
    found = {path.name: validation_losses.get(step_of(path)) for path in all_checkpoints(directory)}
    scored = {name: loss for name, loss in found.items() if math.isfinite(loss or math.nan)}
    if not scored:
        return
    best, partial = min(scored, key=scored.get), directory / "best.partial"
    partial.unlink(missing_ok=True)
    otherwise = f"there is no {directory / 'best'}, and {best} is kept no longer than the others"
    if if_supported(otherwise, os.symlink, best, partial):
        os.replace(partial, directory / "best")


def remove_partial(directory: Path) -> None:
    """Deletes what a killed save or deletion has left behind."""
    for path in directory.glob("step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """Deletes a checkpoint. It is renamed first, so that a kill leaves no half of it. Files that
    cannot be deleted, as on NFS while another process reads them, go at the run's next start.
    """
    doomed = checkpoint.with_name(checkpoint.name + ".old.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
