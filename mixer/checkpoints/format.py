"""The format of checkpoints: directories that from_pretrained loads and training resumes from.

    step-1000/
        config.json  model.safetensors  tokenizer.json ...   what from_pretrained loads, in fp32
        modeling.py ...                   the model's code, for use without this package
        trainer_state/
            trainer.json                  see below
            optimizer-1-of-1.safetensors  the optimizer's state, as PARAMETER/KEY for each parameter
                                          and key; under FSDP a file for each process' shards
            random.safetensors            the random state of each process, as cpu-RANK, cuda-RANK
            files.json                    size and SHA-256 of every file; written last
    best -> step-800                      the checkpoint with the lowest validation loss

trainer.json holds

    format                                    FORMAT, which changes when older code cannot resume
    step, samples, tokens, skipped_steps      how far the run is; samples is its place in the data
    data_directory, data                      where the data is, and what identifies it
    optimizer                                 the settings that decide what the optimizer's state is
    logged_tokens, nats                       tokens at the last line of metrics, and the sum of
                                              the nats since then
    scaler, wandb_id                          the fp16 loss scale, and the run's id at wandb
    settings, earlier                         what the next steps train with, and what the steps up
                                              to others had in place of it
    threads                                   of the CPU, in each process
    mixing                                    the backend that model.mixing_backend=auto stands for,
                                              in it `keyed`, that of keyed mixing

A checkpoint is complete or does not exist: everything is written to step-1000.partial, flushed to
disk, and renamed. Older checkpoints are deleted only after that. writer.py writes checkpoints,
restore.py loads them.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from mixer.common.checksums import has_sha256, sha256
from mixer.common.errors import UserError
from mixer.common.files import publish
from mixer.common.json_file import NONE, object_problem, read_json
from mixer.common.say import Say

FORMAT = 2
STATE = "trainer_state"
TRAINER = f"{STATE}/trainer.json"
RANDOM = f"{STATE}/random.safetensors"
LISTING = f"{STATE}/files.json"
# The entries of trainer.json that more than a resume reads, those that a resume needs besides, and
# those that earlier versions did not write.
TRAINER_FIELDS = {"step": int, "tokens": int, "data_directory": str}
RESUME_FIELDS = {"samples": int, "skipped_steps": int, "data": dict}
RESUME_FIELDS |= {"scaler": (dict, NONE), "wandb_id": (str, NONE)}
LATER_FIELDS = {"optimizer": dict, "threads": int, "mixing": (dict, NONE)}
LATER_FIELDS |= {"logged_tokens": int, "nats": (float, NONE), "settings": dict, "earlier": dict}
# Those of its settings: sections of the run's configuration, and the number of processes.
SETTINGS = {"seed": int, "model": dict, "data": dict, "train": dict, "optim": dict}
SETTINGS |= {"processes": int}
# Those of its scaler, fp16's loss scale, which GradScaler takes as they are.
SCALER_FIELDS = {"scale": float, "growth_factor": float, "backoff_factor": float}
SCALER_FIELDS |= {"growth_interval": int, "_growth_tracker": int}


def step_of(path: Path) -> int:
    """N of step-N, -1 for another name."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match.group(1)) if match else -1


def all_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, complete or damaged, by step."""
    return sorted((p for p in directory.glob("step-*") if step_of(p) >= 0), key=step_of)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Those of `all_checkpoints` whose files are all there, by step."""
    return [path for path in all_checkpoints(directory) if not incomplete(path)]


def optimizer_file(checkpoint: Path, number: int, of: int) -> Path:
    """File `number` (1 is the first) of the optimizer's state, which is in `of` files."""
    return checkpoint / STATE / f"optimizer-{number}-of-{of}.safetensors"


# --- reading and checking ---------------------------------------------------------------------


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """The content of trainer.json; empty if there is none, as for a model from elsewhere.

    Raises UserError if it cannot be read, or is not what training writes.
    """
    file = checkpoint / TRAINER
    if not file.is_file():
        return {}
    remedy = "copy the checkpoint again, or give another one"
    trainer = read_json(file, remedy, required=TRAINER_FIELDS)
    if trainer.get("format") == FORMAT:
        read_json(file, remedy, required=RESUME_FIELDS, optional=LATER_FIELDS)
        earlier = trainer.get("earlier", {})
        problems = {
            "scaler": scaler_problem(trainer["scaler"]),
            "settings": object_problem(trainer.get("settings", {}), {}, SETTINGS),
            "earlier": object_problem(earlier, dict.fromkeys(earlier, dict), {}),
        }
        for key, problem in problems.items():
            if problem:
                raise UserError(f"{file} is damaged ({key}: {problem}): {remedy}")
    return trainer


def earlier_settings(
    earlier: dict[str, dict[str, Any]], left_out: Collection[str] = ()
) -> list[str]:
    """A line for each time that a run has gone on with other settings, from trainer.json."""
    shown = {
        step: ", ".join(f"{key} = {changed[key]}" for key in changed if key not in left_out)
        for step, changed in earlier.items()
    }
    return [f"Until step {step}: {settings}" for step, settings in shown.items() if settings]


def scaler_problem(scaler: dict[str, Any] | None) -> str | None:
    """What is wrong with the state of a loss scale, which is empty or None where training had none;
    None if nothing is.
    """
    if not scaler:
        return None
    problem = object_problem(scaler, SCALER_FIELDS, {})
    if problem:
        return problem
    factors = {name: scaler[name] for name, kind in SCALER_FIELDS.items() if kind is float}
    bad = next((name for name, value in factors.items() if not 0 < value < math.inf), None)
    return f"{bad} = {factors[bad]}, allowed: a finite number above 0" if bad else None


def read_listing(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """{"size": bytes, "sha256": hex digits} of every file of a checkpoint, by name. Raises
    UserError if that cannot be read.
    """
    remedy = "copy the checkpoint again, or give another one"
    files = read_json(checkpoint / LISTING, remedy)
    for name, known in files.items():
        if problem := object_problem(known, {"size": int, "sha256": str}, {}):
            raise UserError(f"{checkpoint / LISTING} is damaged ({name!r}: {problem}): {remedy}")
    return files


def optimizer_files(checkpoint: Path) -> list[Path]:
    """The files of the optimizer's state that were listed, in the order of their processes. Raises
    UserError where one is missing from the listing, or has another name.
    """
    listed = {name for name in read_listing(checkpoint) if name.startswith(f"{STATE}/optimizer-")}
    files = [optimizer_file(checkpoint, number + 1, len(listed)) for number in range(len(listed))]
    wanted = {str(file.relative_to(checkpoint)) for file in files}
    if not listed or listed != wanted:
        raise UserError(
            f"checkpoint {checkpoint} lists {', '.join(sorted(listed)) or 'no optimizer state'}, "
            f"expected {', '.join(sorted(wanted)) or 'it'}: copy it again, or give another one"
        )
    return files


def added(checkpoint: Path, listed: Iterable[str]) -> str | None:
    """A file of a checkpoint that training has not written, and that a library may read; None if
    there is none.
    """
    files = {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()}
    unknown = sorted(files - {LISTING, *listed})
    ignored = re.compile(r"(.*/)?\..*|.*\.(md|pyc)")
    return next((name for name in unknown if not ignored.fullmatch(name)), None)


def incomplete(checkpoint: Path) -> str | None:
    """Which file of a checkpoint is missing or has another size than was written; None if none."""
    if not checkpoint.is_dir():
        return "there is no such directory"
    if not (checkpoint / LISTING).is_file():
        return f"it is incomplete: {LISTING} is missing"
    try:
        files = read_listing(checkpoint)
    except UserError as error:
        return f"it is damaged, or of an older format: {error}"
    for name, known in files.items():
        if not (checkpoint / name).is_file():
            return f"it is incomplete: {name} is missing"
        found = (checkpoint / name).stat().st_size
        if found != known["size"]:
            return f"it is damaged: {name} has {found} bytes, {known['size']} were written"
    return None


def damage(checkpoint: Path) -> str | None:
    """As `incomplete`, and also compares the content of every file with its SHA-256."""
    problem = incomplete(checkpoint)
    if problem:
        return problem
    for name, known in read_listing(checkpoint).items():
        try:
            if sha256(checkpoint / name) != known["sha256"]:
                return f"it is damaged: {name} is not what was written (its SHA-256 differs)"
        except OSError as error:
            return f"it cannot be read: {error}"
    return None


def changed(checkpoint: Path) -> str | None:
    """Which of the files that a model is loaded from is not what training wrote; None if none, and
    for a model from elsewhere, which has no trainer_state.

    Compares their SHA-256, once on each machine. The optimizer's state is not looked at.
    """
    if re.fullmatch(r"step-\d+(\.old)?\.partial", checkpoint.name):
        return "it was being written or deleted"
    if not (checkpoint / STATE).is_dir():
        return None
    try:
        hashes = {name: known["sha256"] for name, known in read_listing(checkpoint).items()}
    except UserError as error:
        return str(error)
    needed = (name for name in hashes if name == TRAINER or not name.startswith(f"{STATE}/"))
    for name in needed:
        try:
            if not has_sha256(checkpoint / name, hashes[name]):
                return f"{name} is not what was written (its SHA-256 differs)"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read ({error})"
    name = added(checkpoint, hashes)
    return f"{name} was added, which may change what is loaded" if name else None


# --- completing and pruning -------------------------------------------------------------------


def complete(partial: Path, final: Path, say: Say = print) -> None:
    """Turns a directory with all files of a checkpoint into a complete checkpoint, `final`."""
    files = {
        str(file.relative_to(partial)): {"size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    (partial / LISTING).write_text(json.dumps(files, indent=1))
    if final.exists():  # a damaged checkpoint of the same step, which resuming passed over
        _remove(final, say)
    publish(partial, final)


def prune(directory: Path, keep: int, keep_every: int, say: Say = print) -> None:
    """Deletes complete checkpoints, except the newest `keep`, those whose step `keep_every`
    divides, and the best one.
    """
    best = (directory / "best").resolve()
    for path in complete_checkpoints(directory)[:-keep]:
        if path.resolve() != best and not (keep_every and step_of(path) % keep_every == 0):
            _remove(path, say)


def link_best(
    directory: Path, validation_losses: dict[int, float | None], say: Say = print
) -> None:
    """Links `best` to the complete checkpoint with the lowest validation loss, if there is one.

    validation_losses: by step; None or NaN where the loss was not finite. A file system without
    links is only reported.
    """
    scored = [
        (loss, step)
        for step, loss in validation_losses.items()
        if loss is not None and math.isfinite(loss) and not incomplete(directory / f"step-{step}")
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
            f"{directory / 'best'} could not be linked to {best} ({error}), which is kept no "
            "longer than the others"
        )


def remove_partial(directory: Path, say: Say = print) -> None:
    """Deletes what a killed save or deletion left behind."""
    for path in directory.glob("step-*.partial"):
        _delete(path, say)


def _remove(checkpoint: Path, say: Say) -> None:
    """Deletes a checkpoint. It is renamed first: a killed deletion leaves no half checkpoint."""
    doomed = checkpoint.with_name(checkpoint.name + ".old.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(checkpoint, doomed)
    _delete(doomed, say)


def _delete(path: Path, say: Say) -> None:
    """Deletes a directory. A failure, as on NFS while another process reads one of the files, is
    reported and does not end the run.
    """
    try:
        if path.is_symlink():  # someone has moved the checkpoint elsewhere, where it stays
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        say(f"{path} could not be deleted ({error}); the next start of the run tries again")
