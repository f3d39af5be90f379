"""Locks between processes: one file, and a run's directory."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mixer.common.errors import UserError
from mixer.common.files import missing_directories, remove_empty


@contextmanager
def locked(file: Path, wait: bool = True) -> Iterator[None]:
    """Holds an exclusive lock on a file, which is made if needed and never removed (removing it
    would be a race). The system drops the lock when this process dies.

    Without `wait`, raises BlockingIOError if another process holds the lock. On a file system that
    has no locks nothing is locked.
    """
    with open(file, "a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                raise
        yield


@contextmanager
def run_locked(directory: Path) -> Iterator[None]:
    """Makes a run's directory and holds its lock. A run that ends by an error before it has written
    anything leaves no directory behind.

    Raises UserError if another process trains the run, such as one that has outlived its launcher,
    and if the directory cannot be written to.
    """
    held, lock, missing = ExitStack(), directory / ".lock", missing_directories(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(lock, wait=False))
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
        try:
            yield
        except BaseException:
            if missing and os.listdir(directory) == [lock.name]:
                lock.unlink()
                remove_empty(missing)
            raise
