"""Files: written atomically by one process at a time, and checked when they are read."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from mixer.common.errors import UserError, first_line, say_on_stderr, warn
from mixer.common.options import is_plain_text
from mixer.common.progress import time_reported
from mixer.common.values import shape_problem

STAGE = ".partial-"  # the names of what is being written begin with this; then HOST@NAME
# The umask can only be read by setting it, which affects all threads: once, at the import.
UMASK = os.umask(0o077)
os.umask(UMASK)
# In JSON, a list that holds no objects; its items may be such lists.
LIST = re.compile(r"\[(?:[^\[\]{}]|\[[^\[\]{}]*\])*\]")
LARGE = 2e9  # bytes; hashing them takes noticeable time
# How network file systems and FUSE answer calls that they do not support.
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}
# Options of Lustre and NFS by which a lock is this host's alone.
LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, which becomes `path` once it is whole and on disk.

    Readers find the old file or the new one, also after a kill or on a full disk. Processes that
    write the same file take turns. Missing directories are created, and links are followed.
    Raises UserError if it cannot be written, and leaves everything as it was.
    """
    path = Path(os.path.realpath(path))
    with _all_or_nothing(path, path) as stage:
        yield stage
        publish(stage, path)


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """`whole_file` for a directory: files written into the one that it yields appear in
    `directory`. If that exists, files of the same names are replaced, and others stay.
    """
    final = directory
    if directory.is_dir():  # inside it, as it may be a mounted disk
        final = directory / directory.resolve().name
    with _all_or_nothing(directory, final) as stage:
        stage.mkdir()
        yield stage
        publish(stage, directory)


def publish(stage: Path, final: Path) -> None:
    """Renames a file or a directory once all of it is on disk. In a directory that exists, files
    are replaced one by one.
    """
    for path in (*stage.rglob("*"), stage):
        if path.suffix == ".safetensors":  # whose library lets only the owner read its files
            consequence = "other users may be unable to read the weights"
            if_supported(consequence, os.chmod, path, 0o666 & ~UMASK)
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
    """`whole_file` for measured results, with each list of numbers on one line."""
    text = json.dumps(result, indent=1)
    on_one_line = LIST.sub(lambda match: re.sub(r"\n *", "", match[0]), text)
    write_text(path, on_one_line + "\n")


@contextmanager
def _all_or_nothing(output: Path, final: Path) -> Iterator[Path]:
    """Yields a temporary path beside `final`, under a lock. If the block fails, nothing of it
    stays, and a system error becomes a UserError about `output`.
    """
    # The host is in the name because not every file system has locks that reach other hosts.
    stage = final.with_name(f"{STAGE}{socket.gethostname()}@{final.name}")
    lock = final.with_name(f"{STAGE}{final.name}.lock")
    waiting = f"waiting for another process, which writes {output} ({lock} is its lock)"
    try:
        with locked(lock, lambda: say_on_stderr(waiting)) as is_alone:
            try:
                for path in _stages_of(final):  # left behind by killed processes
                    if path == stage or (is_alone and _locks_reach_all_hosts(final)):
                        remove(path)
                yield stage
            finally:
                remove(stage)
    except Exception as error:
        system = as_system_error(error)
        if not isinstance(system, OSError):
            raise
        raise UserError(
            f"{output} could not be written ({system}) and is unchanged: fix the cause, then run "
            "the same command again"
        ) from error


def _stages_of(final: Path) -> list[Path]:
    """The temporary paths beside a path that become it, of all hosts."""
    stages = final.parent.glob(f"{STAGE}*@*")
    return [path for path in stages if path.name.partition("@")[2] == final.name]


def _locks_reach_all_hosts(path: Path) -> bool:
    """Whether other hosts that share a path's file system see its locks, as far as is known."""
    mounts = psutil.disk_partitions(all=True)
    above = [mount for mount in mounts if path.resolve().is_relative_to(mount.mountpoint)]
    mount = max(above, key=lambda mount: len(mount.mountpoint), default=None)
    if mount is None:
        return True
    has_local_locks = LOCAL_LOCKS.intersection(mount.opts.split(","))
    return not (mount.fstype.startswith("fuse") or has_local_locks)


def as_system_error(error: BaseException) -> BaseException:
    """The OSError that safetensors or tokenizers have wrapped in a type of their own."""
    foreign = type(error).__name__ == "SafetensorError" or type(error) is Exception
    is_wrapped = foreign and re.search(r"I/O error|os error", str(error))
    return OSError(str(error)) if is_wrapped else error


def remove(path: Path) -> None:
    """Deletes a file or directory, or leaves it if it cannot be deleted."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def flush(path: Path) -> None:
    """Waits until a file's content, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if_supported("a power failure may undo what was just written", os.fsync, descriptor)
    finally:
        os.close(descriptor)


def if_supported(consequence: str, system_call: Callable, *arguments) -> bool:
    """Makes a system call that some file systems do not support. If this one does not, warns once
    of the consequence and returns False.
    """
    try:
        system_call(*arguments)
        return True
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        refusal = f"a file system refuses {system_call.__name__} ({error.strerror})"
        warn(f"{refusal}: {consequence}")
        return False


@contextmanager
def locked(file: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Holds an exclusive lock on a file, which the system drops when this process dies. The file
    and missing directories are created, and removed in the end, the directories if empty. Yields
    whether there is a lock: not every file system has them.

    `waiting` is called before this process waits for another one that holds the lock.
    """
    missing = [path for path in file.parents if not path.exists()]
    try:
        opened, is_locked = _open_locked(file, waiting)
        with opened:
            try:
                yield is_locked
            finally:
                file.unlink(missing_ok=True)
    finally:
        for directory in missing:
            with suppress(OSError):
                directory.rmdir()


def _open_locked(file: Path, waiting: Callable[[], None]) -> tuple[IO, bool]:
    consequence = "do not start the same command twice, as the two would not see each other"
    while True:
        opened = _open_new(file)
        try:
            at_once = fcntl.LOCK_EX | fcntl.LOCK_NB
            is_locked = if_supported(consequence, fcntl.flock, opened, at_once)
        except BlockingIOError:
            waiting()
            fcntl.flock(opened, fcntl.LOCK_EX)
            is_locked = True
        # Whoever held the lock may have removed the file. Its number of links does not tell: NFS
        # renames an open file that is removed.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(opened.fileno()), os.stat(file)):
                return opened, is_locked
        opened.close()


def _open_new(file: Path) -> IO:
    """Opens a file in a directory that other processes may remove at any time."""
    for _ in range(100):
        with suppress(FileNotFoundError, FileExistsError):
            file.parent.mkdir(parents=True, exist_ok=True)
            return open(file, "a")
    return open(file, "a")  # which says what is wrong


def run_locked(directory: Path) -> AbstractContextManager[bool]:
    """Creates a run's directory and holds its lock. A run that writes nothing leaves nothing.

    Raises UserError if nothing can be written there, and if another process trains the run, such
    as one that outlived its launcher.
    """
    check_writable(directory, "output_dir")

    def refuse() -> None:
        raise UserError(
            f"{directory} is being trained by another process (pgrep -f train shows it); wait for "
            "it, stop it, or choose another name"
        )

    return locked(directory / ".lock", refuse)


# ------------------------------------------------------------------------- what options name


def as_path(name: str | Path) -> Path:
    """The path that an option of a command or a configuration names. All of them are read here.

    ~ is the home directory: no shell expands it in YAML, or after an equals sign. Raises UserError
    for a user that there is not, and a name that is not UTF-8 text, which some libraries cannot
    open.
    """
    if not is_plain_text(str(name)):
        raise UserError(f"{str(name)!r} is not UTF-8 text: rename it, or name its folder")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        problem = f"{name}: there is no home directory of {Path(name).parts[0]}"
        raise UserError(f"{problem}; give the whole path, or ./{name} for what is here") from None


# ------------------------------------------------------------------------- where results go


def results_locked(output: Path) -> AbstractContextManager[bool]:
    """Holds the lock of a command's results, a file or a directory, while the command works. What
    `whole_file` and `whole_directory` take is held while they write, and another one.

    Raises UserError if another command works on the same results, one of which would be lost.
    """

    def refuse() -> None:
        raise UserError(
            f"{output} is being written by another command: wait for it, or choose another --output"
        )

    results = Path(os.path.realpath(output))
    if results.is_dir():  # inside it, as it may be a mounted disk
        results = results / results.name
    return locked(results.with_name(f"{STAGE}{results.name}.results"), refuse)


def check_new(output: Path) -> None:
    """Raises UserError unless `output` is new or an empty directory. Temporary files of
    `whole_directory` do not count.
    """
    names = os.listdir(output) if output.is_dir() else []
    filled = any(not name.startswith(STAGE) for name in names)
    if filled or (output.exists() and not output.is_dir()):
        raise UserError(f"{output} already exists; choose another --output, or delete it")
    check_writable(output)


def check_writable(directory: Path, option: str = "--output") -> None:
    """Raises UserError if nothing can be written to `directory`, which `option` names. It creates
    nothing: call it before hours of work.
    """
    directory = directory.absolute()
    paths = (directory, *directory.parents)
    existing = next(path for path in paths if os.path.lexists(path))
    checkpoints = (path for path in paths if (path / "trainer_state").is_dir())
    problem = ""
    if not is_plain_text(str(directory)):  # some libraries cannot write there
        problem = "its name is not UTF-8 text"
    elif not existing.is_dir():
        problem = f"{existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} is not writable by you"
    elif checkpoint := next(checkpoints, None):
        problem = f"{checkpoint} is a checkpoint, and other files would make it unusable"
    if problem:
        shown = repr(str(directory))
        raise UserError(f"nothing can be written to {shown}: {problem}; choose another {option}")


def directory_for(checkpoint: Path, prefix: str, subject: str = "", options: str = "") -> Path:
    """The directory for results about a checkpoint, such as runs/demo/eval-step-600. It is beside
    the checkpoint, to which nothing may be added.

    prefix: of its name, such as "eval". subject: the text that was evaluated, say; characters unfit
    for a file name are left out. options: all that are not the default; their hash tells requests
    apart.
    """
    subject = re.sub(r"[^\w.]+", "-", subject)[:40].strip("-.")
    digest = hashlib.sha256(options.encode(errors="replace")).hexdigest()[:6] if options else ""
    checkpoint = Path(os.path.realpath(checkpoint))
    words = (prefix, checkpoint.name, subject, digest)
    return checkpoint.with_name("-".join(filter(None, words)))


# ------------------------------------------------------------------------- what is read


def read_json(file: Path, remedy: str, required: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The object that a JSON file holds.

    required: keys with the shapes of their values (see shape_problem), such as int or {str: dict}.
    Raises UserError that ends in `remedy`, which says what to do.
    """
    values = {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        problem = _object_problem(values, required or {})
    except OSError as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}): {remedy}") from None
    except (ValueError, RecursionError) as error:
        problem = first_line(error)
    if problem:
        raise UserError(f"{file} is damaged ({problem}): {remedy}")
    return values


def _object_problem(values: Any, required: Mapping[str, Any]) -> str:
    """The problem with a file's content; "" if there is none. Raises ValueError for a lone
    surrogate, which no file or file name can hold.
    """
    text = json.dumps(values, ensure_ascii=False)
    text.encode()
    if "\\u0000" in text:
        return "it holds a null character"
    if not isinstance(values, dict):
        return f"it holds {type(values).__name__}, allowed: an object with keys"
    if missing := [key for key in required if key not in values]:
        return f"{missing[0]} missing"
    problems = (shape_problem(values[key], shape, key) for key, shape in required.items())
    return next(filter(None, problems), "")


def cache_home() -> Path:
    """The package's cache: $MIXER_CACHE, or ~/.cache/mixer. Raises RuntimeError for a user without
    a home, as in some containers.
    """
    if named := os.environ.get("MIXER_CACHE"):
        return as_path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixer"


def sha256(path: Path) -> str:
    """The file's SHA-256 in hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_sha256(path: Path, recorded: str) -> bool:
    """Whether the file's SHA-256 is `recorded`. A file that was found good is not read again on
    this machine until it changes. Raises OSError if it cannot be read.
    """
    note = None
    size = path.stat().st_size
    with suppress(OSError, RuntimeError):  # if there is no cache
        note = note_of(path, recorded)
        if note.exists():
            return True
    if size > LARGE:
        say_on_stderr(f"checking the SHA-256 of {path} ({size / 1e9:.1f} GB), once on this machine")
    with time_reported(f"checking {path}"):
        is_good = sha256(path) == recorded
    with suppress(OSError):
        if is_good and note:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
    return is_good


def note_of(path: Path, recorded: str) -> Path:
    """The file in the cache whose existence says that `path`, as it is now, was found good."""
    path = path.resolve()
    status = path.stat()
    state = (path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, recorded)
    lines = "\n".join(map(str, state))
    digest = hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()
    return cache_home() / "sha256" / digest[:32]
