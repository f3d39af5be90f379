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
    mixing                  the backends that model.mixing_backend=auto stood for, in runs from when
                            training timed them first

A checkpoint is complete or does not exist: everything is written to step-1000.partial, flushed to
disk, and renamed. Older checkpoints are deleted only after that. None holds a NaN or an infinity.

Importing this file takes no time: commands read checkpoints before they import PyTorch.
"""

import itertools
import json
import os
import re
from math import isfinite
from pathlib import Path
from typing import Any

from mixer.common.errors import Say, UserError
from mixer.common.files import (
    as_path,
    has_sha256,
    if_supported,
    publish,
    read_json,
    remove,
    sha256,
)
from mixer.common.values import shape_problem

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
    except UserError as error:
        return str(error)
    for name, entry in listing.items():
        is_read = for_resume or name == TRAINER or not name.startswith(f"{STATE}/")
        try:
            if is_read and not has_sha256(checkpoint / name, entry["sha256"]):
                return f"{name} is not what was written (its SHA-256 differs)"
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
    problems = []
    for path in candidates:
        problem = damage(path)
        if problem is None:
            return path
        say(f"skipping {path}: {problem}")
        problems.append(f"{path}: {problem}")
    if problems:  # a fresh start would overwrite them and the run's metrics
        one_only = len(problems) == 1
        which = "the checkpoint cannot" if one_only else f"none of {len(problems)} checkpoints can"
        raise UserError(
            f"{which} be used ({problems[-1]}); give another checkpoint.resume, or choose another "
            "name to start afresh"
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
    best = min(losses, key=losses.__getitem__)
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
