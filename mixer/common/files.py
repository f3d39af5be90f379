"""Writing files and directories so that nothing is ever half there or overwritten by mistake."""

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mixer.common.errors import UserError
from mixer.common.file_systems import if_supported
from mixer.common.locks import locked, missing_directories, remove_empty
from mixer.common.options import is_plain_text
from mixer.common.ranks import rank
from mixer.common.say import say_on_stderr

STAGE = ".partial-"  # the names of what is being written begin with this
# The umask can only be read by setting it, which affects all threads: once, at the import.
UMASK = os.umask(0o077)
os.umask(UMASK)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields where to write a file. It gets its name, `path`, when it is whole and on the disk.

    Who reads it, also after a kill or on a full disk, finds the old file or the new one; of several
    processes that write it each waits for the one before. Missing directories are made. A link
    stays, and the file that it points to is written. Raises UserError where it cannot be written;
    then all is as before.
    """
    path = Path(os.path.realpath(path))
    with _all_or_nothing(path, path) as stage:
        yield stage
        _let_others_read(stage)
        flush(stage)
        os.replace(stage, path)
        flush(path.parent)


@contextmanager
def whole_directory(directory: Path, new: bool = False) -> Iterator[Path]:
    """`whole_file` for several files: what is written into the directory that it yields appears in
    `directory` when all of it is on the disk, with the directory itself if that is new. In one that
    exists, files of the same names are replaced one by one, and others stay. With `new`,
    `check_new` is asked again, as another process may have written there.
    """
    # Inside a directory that exists, which may be a mounted disk.
    inside = directory / directory.resolve().name if directory.is_dir() else directory
    with _all_or_nothing(directory, inside) as stage:
        if new:
            check_new(directory)
        stage.mkdir()
        yield stage
        if not directory.is_dir():
            publish(stage, directory)
            return
        _let_others_read(*stage.iterdir())
        flush_tree(stage)
        for file in stage.iterdir():
            os.replace(file, directory / file.name)
        flush(directory)


def publish(partial: Path, final: Path) -> None:
    """Gives a directory its name, which must be free or an empty directory's, when all of it is on
    the disk.
    """
    _let_others_read(*partial.rglob("*"))
    flush_tree(partial)
    os.rename(partial, final)
    flush(final.parent)


def write_text(path: Path, text: str) -> None:
    """`whole_file` for text, in UTF-8."""
    with whole_file(path) as stage:
        stage.write_text(text, encoding="utf-8")


@contextmanager
def _all_or_nothing(output: Path, place: Path) -> Iterator[Path]:
    """Yields where to write what gets the name `place`, whose directories are made, while no other
    process does the same. If the block fails, deletes all of this; an error of the system becomes a
    UserError about `output`.
    """
    missing = missing_directories(place.parent)
    # The host is in the name because locks do not reach across machines on every file system.
    stage = place.with_name(f"{STAGE}{socket.gethostname()}-{place.name}")
    lock = place.with_name(f"{STAGE}{place.name}.lock")

    def waiting() -> None:
        if rank() == 0:
            say_on_stderr(
                f"waiting for another process, which writes {output} ({lock} is its lock)"
            )

    try:
        with locked(lock, waiting):
            try:
                _remove(stage)  # what a killed process has left
                yield stage
            finally:
                _remove(stage)
    except BaseException as error:
        remove_empty(missing)
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


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _let_others_read(*files: Path) -> None:
    """safetensors lets only the owner read its files; the umask shall decide."""
    for file in files:
        if file.suffix == ".safetensors":
            otherwise = "other users may be unable to read the weights"
            if_supported(otherwise, os.chmod, file, 0o666 & ~UMASK)


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
    """The directory for results about a checkpoint, such as runs/demo/eval-step-600. It is beside
    the checkpoint, whose own files training has listed and nothing may change.

    about: what else the results are of; what no name of a file can be is left out. asked: all that
    was asked for, if it is not the default. Its hash is in the name, so that what was asked for in
    another way has another directory.
    """
    about = re.sub(r"[^\w.]+", "-", about)[:40].strip("-.")
    own = asked and hashlib.sha256(asked.encode(errors="replace")).hexdigest()[:6]
    checkpoint = Path(os.path.realpath(checkpoint))
    return checkpoint.with_name("-".join(filter(None, (what, checkpoint.name, about, own))))


def flush(path: Path) -> None:
    """Waits until a file's content, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if_supported("a power failure may undo what was just written", os.fsync, descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """`flush` for a directory and everything in it."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)
