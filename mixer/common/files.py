"""Writing files and directories so that nothing is ever half there or overwritten by mistake."""

import errno
import functools
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mixer.common.errors import UserError
from mixer.common.options import is_plain_text
from mixer.common.ranks import rank
from mixer.common.say import say_on_stderr

# The umask can only be read by setting it, which affects all threads: once, at the import.
UMASK = os.umask(0o077)
os.umask(UMASK)
# What network file systems and FUSE answer where they cannot do what is asked for.
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields where to write a file. It gets its name, `path`, when it is whole and on the disk.

    Who reads it, also after a kill or on a full disk, finds the old file or the new one. Missing
    directories are made. A link stays, and the file that it points to is written. Raises UserError
    where it cannot be written; then all is as before.
    """
    path = Path(os.path.realpath(path))
    stage = path.with_name(f".partial-{path.name}")
    with _all_or_nothing(path, stage):
        yield stage
        _let_others_read(stage)
        flush(stage)
        os.replace(stage, path)
        flush(path.parent)


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """`whole_file` for a directory: what is written into the one that it yields appears in
    `directory`, with the directory itself if that does not exist yet.

    In one that exists, files of the same names are replaced one by one, and the others stay.
    """
    exists = directory.is_dir()
    # Inside one that exists, which may be a mounted disk.
    place = directory / "x" if exists else directory
    stage = place.with_name(f".partial-{directory.name}")
    with _all_or_nothing(directory, stage):
        stage.mkdir()
        yield stage
        if not exists:
            publish(stage, directory)
            return
        _let_others_read(*stage.iterdir())
        flush_tree(stage)
        for file in stage.iterdir():
            os.replace(file, directory / file.name)
        stage.rmdir()
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
def _all_or_nothing(output: Path, stage: Path) -> Iterator[None]:
    """Makes the directories that `stage` will stand in. If the block fails, deletes `stage` and
    them again; an error of the system becomes a UserError about `output`.
    """
    missing = missing_directories(stage.parent)
    try:
        stage.parent.mkdir(parents=True, exist_ok=True)
        _remove(stage)  # which a killed process has left
        yield
    except BaseException as error:
        _remove(stage)
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


def missing_directories(directory: Path) -> list[Path]:
    """Those of a directory and its parents that do not exist yet, the innermost first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


def remove_empty(directories: list[Path]) -> None:
    """Removes the directories, in their order, but for those that something is in by now."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


def _let_others_read(*files: Path) -> None:
    """safetensors lets only the owner read its files; the umask shall decide."""
    for file in files:
        if file.suffix == ".safetensors":
            otherwise = "other users may be unable to read the weights"
            if_supported(otherwise, os.chmod, file, 0o666 & ~UMASK)


def check_new(output: Path) -> None:
    """Raises UserError unless `output` is free for a new directory, or is an empty one, but for
    what a killed `whole_directory` has left.
    """
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if names - {f".partial-{output.name}"} or (output.exists() and not output.is_dir()):
        raise UserError(f"{output} exists already; choose another --output, or delete it")
    check_writable(output)


def check_writable(directory: Path) -> None:
    """Raises UserError if results cannot be written to `directory`. Call it before hours of work;
    it creates nothing.
    """
    if not is_plain_text(str(directory)):
        raise UserError(
            f"results cannot go to {str(directory)!r}: not every library can write to a name that "
            "is no UTF-8 text; choose another --output"
        )
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
        if rank() == 0:
            _warn(f"warning: a file system refuses {ask.__name__} ({error.strerror}): {otherwise}")
        return False


_warn = functools.cache(say_on_stderr)  # once


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
