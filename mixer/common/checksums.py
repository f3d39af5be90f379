"""SHA-256 of files, compared with what was recorded when they were written.

A large file is read once on each machine: that it was found good is remembered in the cache
directory, for as long as its size and its times of change stay the same.
"""

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

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
    with open(path, "rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            found.update(data)
            done += len(data)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                say(f"comparing {path} with its SHA-256: {done / 1e9:.1f} of {size / 1e9:.1f} GB")
    return found.hexdigest()


def has_sha256(path: Path, recorded: str, say: Say = say_on_stderr) -> bool:
    """Whether the file's SHA-256 is `recorded`. A file that was found good before is not read,
    where the cache directory can be used.

    Raises OSError where the file cannot be read.
    """
    try:
        note = note_of(path, recorded)
        note.parent.mkdir(parents=True, exist_ok=True)
        if note.exists():
            return True
    except (OSError, RuntimeError):
        return sha256(path, say) == recorded
    is_good = sha256(path, say) == recorded
    if is_good:
        with suppress(OSError):
            note.touch()
    return is_good


def note_of(path: Path, recorded: str) -> Path:
    """The file that says, by being there, that `path` as it is now was found good.

    Its name stands for the path, the size, the times of change and the SHA-256, so a file that
    changes has no note. Raises OSError where `path` does not exist, RuntimeError without a home.
    """
    path = path.resolve()
    status = path.stat()
    known = (path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, recorded)
    name = hashlib.sha256("\n".join(map(str, known)).encode(errors="surrogateescape")).hexdigest()
    return cache_home() / "sha256" / name[:32]
