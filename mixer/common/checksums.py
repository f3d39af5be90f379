"""SHA-256 of files, compared with what was recorded when they were written.

A large file is read once on each machine: that it was found good is remembered in the cache
directory, for as long as its size and its times of change stay the same.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from mixer.common.say import Say, say_on_stderr

LARGE = 2e9  # bytes


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
    """Whether the file's SHA-256 is `recorded`. A file that was found good before is not read,
    where the cache directory can be used. `say` is told of a file that takes long.

    Raises OSError where the file cannot be read.
    """
    note = None
    with suppress(OSError, RuntimeError):
        note = note_of(path, recorded)
        note.parent.mkdir(parents=True, exist_ok=True)
        if note.exists():
            return True
    if (size := os.path.getsize(path)) > LARGE:
        say(f"comparing {path} ({size / 1e9:.1f} GB) with its SHA-256, once on this machine")
    is_good = sha256(path) == recorded
    if is_good and note:
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
