"""Files: written whole or not at all, by one process at a time, and compared with their SHA-256."""

import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from mixer.common.errors import Say, UserError, say_on_stderr
from mixer.common.options import is_plain_text

STAGE = ".partial-"  # the names of what is being written begin with this
# The umask can only be read by setting it, which affects all threads: once, at the import.
UMASK = os.umask(0o077)
os.umask(UMASK)
# In JSON, a list without objects, which may have lists without any in it.
LIST = re.compile(r"\[(?:[^\[\]{}]|\[[^\[\]{}]*\])*\]")
LARGE = 2e9  # bytes whose SHA-256 takes noticeable time
# What network file systems and FUSE answer where they cannot do what is asked for.
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


# ------------------------------------------------------------------------- whole or not at all


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields where to write a file. It gets its name, `path`, when it is whole and on the disk.

    A reader finds the old file or the new one, also after a kill or on a full disk. Several
    processes write it one after the other. Missing directories are made, and a link is followed.
    Raises UserError where it cannot be written, and leaves all as it was.
    """
    path = Path(os.path.realpath(path))
    with _all_or_nothing(path, path) as stage:
        yield stage
        publish(stage, path)


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """`whole_file` for a directory: what is written into the one that it yields appears in
    `directory`. If that exists, files of the same names are replaced, and others stay.
    """
    # Inside a directory that exists, which may be a mounted disk.
    inside = directory / directory.resolve().name if directory.is_dir() else directory
    with _all_or_nothing(directory, inside) as stage:
        stage.mkdir()
        yield stage
        publish(stage, directory)


def publish(stage: Path, final: Path) -> None:
    """Gives a file or a directory its name when all of it is on the disk. In a directory that
    exists, files are replaced one by one.
    """
    for path in (*stage.rglob("*"), stage):
        if path.suffix == ".safetensors":  # whose library lets only the owner read its files
            otherwise = "other users may be unable to read the weights"
            if_supported(otherwise, os.chmod, path, 0o666 & ~UMASK)
        flush(path)
    if stage.is_dir() and final.is_dir():
        for file in stage.iterdir():
            os.replace(file, final / file.name)
        flush(final)
    else:
        os.replace(stage, final)
        flush(final.parent)


def write_text(path: Path, text: str) -> None:
    """`whole_file` for text, in UTF-8."""
    with whole_file(path) as stage:
        stage.write_text(text, encoding="utf-8")


def write_json(path: Path, result: dict) -> None:
    """`whole_file` for measured results, with lists of numbers on one line each."""
    text = json.dumps(result, indent=1)
    write_text(path, LIST.sub(lambda found: re.sub(r"\n *", "", found[0]), text) + "\n")


@contextmanager
def _all_or_nothing(output: Path, place: Path) -> Iterator[Path]:
    """Yields where to write what gets the name `place`, while no other process does the same. If
    the block fails, nothing of it stays; an error of the system becomes a UserError about `output`.
    """
    # The host is in the name because locks do not reach across machines on every file system.
    stage = place.with_name(f"{STAGE}{socket.gethostname()}-{place.name}")
    lock = place.with_name(f"{STAGE}{place.name}.lock")
    waiting = f"waiting for another process, which writes {output} ({lock} is its lock)"
    try:
        with locked(lock, lambda: say_on_stderr(waiting)):
            try:
                remove(stage)  # what a killed process has left
                yield stage
            finally:
                remove(stage)
    except Exception as error:
        system = as_system_error(error)
        if not isinstance(system, OSError):
            raise
        raise UserError(
            f"{output} could not be written ({system}), and is as it was before: make space or "
            "give access there, then give the same command again"
        ) from error


def as_system_error(error: BaseException) -> BaseException:
    """The system's error, where safetensors or tokenizers have wrapped it in kinds of their own."""
    foreign = type(error).__name__ == "SafetensorError" or type(error) is Exception
    is_wrapped = foreign and re.search(r"I/O error|os error", str(error))
    return OSError(str(error)) if is_wrapped else error


def remove(path: Path) -> None:
    """Deletes a file or directory. What cannot be deleted stays."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def flush(path: Path) -> None:
    """Waits until a file's content, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if_supported("a power failure may undo what was just written", os.fsync, descriptor)
    finally:
        os.close(descriptor)


def if_supported(otherwise: str, ask: Callable, *arguments) -> bool:
    """Asks the system for what a file system may lack. Where it does, says once what follows from
    that, and returns False.
    """
    try:
        ask(*arguments)
        return True
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _warn(f"warning: a file system refuses {ask.__name__} ({error.strerror}): {otherwise}")
        return False


_warn = functools.cache(say_on_stderr)  # once


# ------------------------------------------------------------------------- locks


@contextmanager
def locked(file: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock on a file, which the system drops when this process dies. The file
    and its missing directories are made for this, and removed in the end, the directories if empty.

    `waiting` is called if another process holds the lock, before this one waits for it.
    """
    otherwise = "do not start the same command twice, as the two would not see each other"
    missing = [path for path in file.parents if not path.exists()]
    try:
        while True:
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(file, "a") as opened:
                try:
                    if_supported(otherwise, fcntl.flock, opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    waiting()
                    fcntl.flock(opened, fcntl.LOCK_EX)
                if os.fstat(opened.fileno()).st_nlink == 0:  # whoever held the lock removed it
                    continue
                try:
                    yield
                finally:
                    file.unlink(missing_ok=True)
                return
    finally:
        for directory in missing:
            with suppress(OSError):
                directory.rmdir()


def run_locked(directory: Path) -> AbstractContextManager[None]:
    """Makes a run's directory and holds its lock. A run that has written nothing leaves nothing.

    Raises UserError if another process trains the run, such as one that has outlived its launcher.
    """

    def refuse() -> None:
        raise UserError(
            f"{directory} is being trained by another process (pgrep -f train shows it); wait for "
            "it, end it, or choose another name"
        )

    return locked(directory / ".lock", refuse)


# ------------------------------------------------------------------------- where results go


def check_new(output: Path) -> None:
    """Raises UserError unless `output` is free for a new directory, or is an empty one, except for
    what `whole_directory` writes there or a killed one has left.
    """
    names = os.listdir(output) if output.is_dir() else []
    filled = any(not name.startswith(STAGE) for name in names)
    if filled or (output.exists() and not output.is_dir()):
        raise UserError(f"{output} exists already; choose another --output, or delete it")
    check_writable(output)


def check_writable(directory: Path) -> None:
    """Raises UserError if results cannot be written to `directory`. Call it before hours of work;
    it creates nothing.
    """
    places = (directory.absolute(), *directory.absolute().parents)
    existing = next(path for path in places if os.path.lexists(path))
    problem = ""
    if not is_plain_text(str(directory)):  # some libraries cannot write there
        problem = "its name is no UTF-8 text"
    elif not existing.is_dir():
        problem = f"{existing} is no directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} does not allow it"
    elif checkpoint := next((path for path in places if (path / "trainer_state").is_dir()), None):
        problem = f"{checkpoint} is a checkpoint, which is refused with other files in it"
    if problem:
        shown = repr(str(directory))
        raise UserError(f"results cannot go to {shown}: {problem}; choose another --output")


def directory_for(checkpoint: Path, what: str, about: str = "", asked: str = "") -> Path:
    """The directory for results about a checkpoint, such as runs/demo/eval-step-600, beside the
    checkpoint, whose own files nothing may change.

    about: what else the results are of; what no name of a file can be is left out. asked: all that
    was asked for, if it is not the default. Its hash makes the name this request's own.
    """
    about = re.sub(r"[^\w.]+", "-", about)[:40].strip("-.")
    own = asked and hashlib.sha256(asked.encode(errors="replace")).hexdigest()[:6]
    checkpoint = Path(os.path.realpath(checkpoint))
    return checkpoint.with_name("-".join(filter(None, (what, checkpoint.name, about, own))))


# ------------------------------------------------------------------------- SHA-256


def cache_home() -> Path:
    """Where this package keeps what it can make again: $MIXER_CACHE, or ~/.cache/mixer.

    Raises RuntimeError for a user without a home, as in some containers.
    """
    if named := os.environ.get("MIXER_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixer"


def sha256(path: Path) -> str:
    """The file's SHA-256 in hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_sha256(path: Path, recorded: str, say: Say = say_on_stderr) -> bool:
    """Whether the file's SHA-256 is `recorded`. A file that was found good is not read again on
    this machine until it changes. `say` is told of a file that takes long.

    Raises OSError where the file cannot be read.
    """
    note, size = None, path.stat().st_size
    with suppress(OSError, RuntimeError):  # where there is no cache
        note = note_of(path, recorded)
        if note.exists():
            return True
    if size > LARGE:
        say(f"comparing {path} ({size / 1e9:.1f} GB) with its SHA-256, once on this machine")
    is_good = sha256(path) == recorded
    with suppress(OSError):
        if is_good and note:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
    return is_good


def note_of(path: Path, recorded: str) -> Path:
    """The file that says, by being there, that `path` as it is now was found good. Its name stands
    for all that changes when the file does.
    """
    path = path.resolve()
    status = path.stat()
    known = (path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, recorded)
    name = hashlib.sha256("\n".join(map(str, known)).encode(errors="surrogateescape")).hexdigest()
    return cache_home() / "sha256" / name[:32]
