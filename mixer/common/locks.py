"""Locks between processes: one file, and a run's directory."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from mixer.common.errors import UserError
from mixer.common.file_systems import if_supported


@contextmanager
def locked(
    file: Path, waiting: Callable[[], None] = lambda: None, remove: bool = False
) -> Iterator[None]:
    """Holds an exclusive lock on a file, which is made if needed, as is its folder, and with
    `remove` removed in the end. The system drops the lock when this process dies.

    `waiting` is called if another process holds the lock, before this one waits for it.
    """
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a") as opened, socket.socket(socket.AF_UNIX) as name:
            if not _acquired(opened, name):
                waiting()
                while not _acquired(opened, name):
                    time.sleep(0.1)
            if not _is_at(opened, file):  # who held the lock has removed the file
                continue
            try:
                yield
            finally:
                if remove:
                    file.unlink(missing_ok=True)
            return


def _acquired(opened: IO, name: socket.socket) -> bool:
    """Locks the file, or, where its file system cannot, its name on this machine, which Linux gives
    once. Returns False if another process holds the lock.
    """
    otherwise = "do not start the same on two machines, as they would not see each other's locks"
    status = os.fstat(opened.fileno())
    try:
        if not if_supported(otherwise, fcntl.flock, opened, fcntl.LOCK_EX | fcntl.LOCK_NB):
            name.bind(f"\0mixer-{status.st_dev}-{status.st_ino}")
        return True
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EADDRINUSE):
            raise
        return False


def _is_at(opened: IO, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened.fileno()), os.stat(file))
    except FileNotFoundError:
        return False


@contextmanager
def run_locked(directory: Path) -> Iterator[None]:
    """Makes a run's directory and holds its lock. A run that ends by an error before it has written
    anything leaves nothing behind.

    Raises UserError if another process trains the run, such as one that has outlived its launcher,
    and if the directory cannot be written to.
    """
    held, lock, missing = ExitStack(), directory / ".lock", missing_directories(directory)

    def refuse() -> None:
        raise UserError(
            f"{directory} is being trained by another process (pgrep -f train shows it); wait for "
            "it, end it, or choose another name"
        )

    try:
        directory.mkdir(parents=True, exist_ok=True)
        before = set(os.listdir(directory))
        held.enter_context(locked(lock, refuse))
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written to: {error}; give access to it, or choose another "
            "output_dir"
        ) from None
    with held:
        try:
            yield
        except BaseException:
            if set(os.listdir(directory)) - before == {lock.name}:
                lock.unlink()
                remove_empty(missing)
            raise


def missing_directories(directory: Path) -> list[Path]:
    """Those of a directory and its parents that do not exist yet, the innermost first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


def remove_empty(directories: list[Path]) -> None:
    """Removes the directories, in their order, but for those that something is in by now."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()
