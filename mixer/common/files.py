"""Writing files and directories so that nothing is ever half there or overwritten by mistake."""

import fcntl
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mixer.common.errors import UserError

# The umask can only be read by setting it, which affects all threads: once, at the import.
UMASK = os.umask(0o077)
os.umask(UMASK)


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step: a reader, also after a kill, sees the old text or the new."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def check_writable(directory: Path) -> None:
    """Raises UserError if results cannot be written to `directory`. Call it before hours of work;
    it creates nothing.
    """
    places = (directory.absolute(), *directory.absolute().parents)
    existing = next(path for path in places if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "nothing can be written into it" if existing.is_dir() else "it is a file"
        raise UserError(
            f"results cannot go to {directory}: of {existing}, {problem}; choose another --output"
        )


def directory_for(checkpoint: Path, what: str) -> Path:
    """The directory for results about a checkpoint, such as runs/demo/eval-step-600. It is beside
    the checkpoint, whose own files training has listed and nothing may change.
    """
    checkpoint = checkpoint.resolve()
    return checkpoint.with_name(f"{what}-{checkpoint.name}")


def place_for(results, directory: Path, file: str, asked: Callable) -> Path:
    """The first of `directory`, `directory`-2, `directory`-3, ... that has no results of another
    kind.

    file: the name of the JSON file of results. asked: a function from results to what was asked
    for. Results that were asked for in the same way are replaced.
    """
    numbered = (directory.with_name(f"{directory.name}-{n}") for n in itertools.count(2))
    for place in itertools.chain([directory], numbered):
        if not _has_other_results(place / file, results, asked):
            return place


def _has_other_results(file: Path, results, asked: Callable) -> bool:
    try:
        return file.exists() and asked(json.loads(file.read_text("utf-8"))) != asked(results)
    except (ValueError, TypeError, KeyError):
        return False  # not written by this package, or not to its end


def flush(path: Path) -> None:
    """Waits until a file's content, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """`flush` for a directory and everything in it."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)


@contextmanager
def locked(file: Path, wait: bool = True) -> Iterator[None]:
    """Holds an exclusive lock on a file, which is made if needed and never removed (removing it
    would be a race). The system drops the lock when this process dies.

    Without `wait`, raises BlockingIOError if another process holds the lock.
    """
    with open(file, "a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def run_locked(directory: Path) -> Iterator[None]:
    """Makes a run's directory and holds its lock.

    Raises UserError if another process trains the run, such as one that has outlived its launcher,
    and if the directory cannot be written to.
    """
    held = ExitStack()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(directory / ".lock", wait=False))
    except BlockingIOError:
        raise UserError(
            f"{directory} is being trained by another process (pgrep -f train shows it); wait for "
            "it, end it, or choose another name"
        ) from None
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written to: {error}; give access to it, or choose another "
            "output_dir"
        ) from None
    with held:
        yield
