"""Locks between processes: one file, and a run's directory."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mixer.common.errors import UserError
from mixer.common.file_systems import if_supported


@contextmanager
def locked(file: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds an exclusive lock on a file, which is made for this, as is its folder, and removed in
    the end. The system drops the lock when this process dies.

    `waiting` is called if another process holds the lock, before this one waits for it.
    """
    otherwise = "do not start the same command twice, as the two would not see each other"
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a") as opened:
            try:
                if_supported(otherwise, fcntl.flock, opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(opened, fcntl.LOCK_EX)
            if not _is_at(opened.fileno(), file):  # the process that held the lock has removed it
                continue
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


@contextmanager
def run_locked(directory: Path) -> Iterator[None]:
    """Makes a run's directory and holds its lock. A run that has written nothing leaves nothing.

    Raises UserError if another process trains the run, such as one that has outlived its launcher.
    """

    def refuse() -> None:
        raise UserError(
            f"{directory} is being trained by another process (pgrep -f train shows it); wait for "
            "it, end it, or choose another name"
        )

    missing = missing_directories(directory)
    try:
        with locked(directory / ".lock", refuse):
            yield
    finally:
        remove_empty(missing)


def missing_directories(directory: Path) -> list[Path]:
    """Those of a directory and its parents that do not exist yet, the innermost first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


def remove_empty(directories: list[Path]) -> None:
    """Removes the directories, in their order, except those that contain something."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()
