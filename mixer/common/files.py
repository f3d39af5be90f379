"""Files that are there whole or not at all, and directories of results that take no others'
place.
"""

import fcntl
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mixer.common.errors import UserError

UMASK = os.umask(0o077)  # it can be read by setting it alone: once, before there are threads
os.umask(UMASK)


def write_text(path: Path, text: str) -> None:
    """Replaces the file at once: a reader, or a kill, meets the old text or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def check_writable(directory: Path) -> None:
    """Raises UserError where results cannot go into `directory`, before hours are spent on them;
    makes nothing.
    """
    existing = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "nothing can be written into it" if existing.is_dir() else "it is a file"
        raise UserError(
            f"results cannot go to {directory}: of {existing}, {problem}; choose another --output"
        )


def directory_for(checkpoint: Path, what: str) -> Path:
    """Where what is told of a checkpoint goes: beside it, because the checkpoint's own files stay
    as training listed them.
    """
    checkpoint = checkpoint.resolve()
    return checkpoint.with_name(f"{what}-{checkpoint.name}")


def place_for(results, directory: Path, file: str, asked: Callable) -> Path:
    """`directory`, or `directory`-2, -3, ... where its JSON `file` has results that something else
    was `asked` for.
    """

    def holds_another(place: Path) -> bool:
        try:
            return (place / file).exists() and asked(
                json.loads((place / file).read_text(encoding="utf-8"))
            ) != asked(results)
        except (ValueError, TypeError, KeyError):
            return False  # none that were written here, or not all of them

    places = itertools.chain(
        [directory], (directory.with_name(f"{directory.name}-{n}") for n in itertools.count(2))
    )
    return next(place for place in places if not holds_another(place))


def flush(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """`flush` for a directory and all that is in it."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)


@contextmanager
def run_locked(directory: Path) -> Iterator[None]:
    """Makes and holds a run's directory; the lock ends with this process, however it ends.

    Raises UserError where another process trains the run, such as a worker that has outlived its
    launcher, and where nothing can be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / ".lock", "w")
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written to: {error}; give access to it, or choose another output_dir"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory} is being trained by another process (pgrep -f train.py shows it); wait for it, end it, "
                "or choose another name"
            ) from None
        yield
