"""SHA-256 of files, compared with what was recorded when they were written.

A large file is read once on each machine: that it was found good is remembered in the cache
directory, for as long as its size and its times of change stay the same.
"""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from mixer.common.locks import locked
from mixer.common.say import Say, say_on_stderr

READ_BYTES = 8 << 20
REPORT_SECONDS = 5.0


def cache_home() -> Path:
    """Where this package keeps what it can make again: $MIXER_CACHE, or ~/.cache/mixer.

    Raises RuntimeError for a user without a home, as in some containers.
    """
    if named := os.environ.get("MIXER_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixer"


def sha256(path: Path, say: Say = say_on_stderr) -> str:
    """The file's SHA-256 in hex digits. `say` is told every few seconds how far it is."""
    found, size, done = hashlib.sha256(), os.path.getsize(path), 0
    reported = time.monotonic()
    # One thread reads ahead while this one computes; both leave Python's lock to the other.
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(file.read, READ_BYTES)
        while data := ahead.result():
            ahead = reader.submit(file.read, READ_BYTES)
            found.update(data)
            done += len(data)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                say(f"comparing {path} with its SHA-256: {done / 1e9:.1f} of {size / 1e9:.1f} GB")
    return found.hexdigest()


def has_sha256(path: Path, recorded: str, say: Say = say_on_stderr) -> bool:
    """Whether the file's SHA-256 is `recorded`. A file that was found good before is not read.

    Of several processes that ask at once one reads the file, and the others wait. Where the cache
    directory cannot be used, each reads it. Raises OSError where the file cannot be read.
    """
    with ExitStack() as lock:
        try:
            note = note_of(path, recorded)
            if not _is_written(note):
                note.parent.mkdir(parents=True, exist_ok=True)
                lock.enter_context(locked(note))
        except (OSError, RuntimeError):
            return sha256(path, say) == recorded
        if _is_written(note):
            return True
        is_good = sha256(path, say) == recorded
        if is_good:
            _write(note, path)
        return is_good


def note_of(path: Path, recorded: str) -> Path:
    """The file that says, if it is not empty, that `path` as it is now was found good.

    Its name stands for the path, the size, the times of change and the SHA-256, so a file that
    changes has no note. Raises OSError where `path` does not exist, RuntimeError without a home.
    """
    path = path.resolve()
    status = path.stat()
    known = (path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, recorded)
    name = hashlib.sha256("\n".join(map(str, known)).encode(errors="surrogateescape")).hexdigest()
    return cache_home() / "verified" / name[:32]


def _is_written(note: Path) -> bool:
    return note.is_file() and note.stat().st_size > 0


def _write(note: Path, path: Path) -> None:
    """Writes the note, and deletes those about files that are no longer there."""
    try:
        for other in note.parent.iterdir():
            about = other.read_text(errors="surrogateescape")
            if about and not Path(about).exists():
                other.unlink(missing_ok=True)
        note.write_text(str(path.resolve()), errors="surrogateescape")
    except OSError:
        pass  # then the file is read again the next time
