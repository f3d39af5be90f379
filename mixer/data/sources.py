"""Where documents come from: the parts of a source, which are its files, or a dataset of the hub.

The parts, one after the other, give the documents in an order that does not change.
"""

import fnmatch
import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mixer.common.errors import UserError
from mixer.common.ranks import Say, say_on_stderr
from mixer.data.config import DataConfig

BETWEEN = "\0"  # the two texts of a pair, of which the first has none
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = {
    "jsonl": tuple(n + how for n in (".jsonl", ".json", ".ndjson") for how in ("", *COMPRESSED)),
    "parquet": (".parquet",),
}
LEFT_OUT_OF_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Part:
    """A file of a source, or all of a hub dataset."""

    config: DataConfig
    file: Path | None = None

    @property
    def name(self) -> str:
        dataset = filter(None, (self.config.path, self.config.subset, self.config.split))
        return str(self.file or f"hub dataset {' '.join(dataset)}")


def source_parts(
    config: DataConfig, say: Say = say_on_stderr, option: str = "data.path"
) -> list[Part]:
    """The parts of the source, in order. Raises UserError if there are none; `option` is what the
    user has given the path as.
    """
    if config.source == "hub":
        return [Part(config)]
    builtin = config.source == "builtin"
    files = _builtin_files(config) if builtin else local_files(config, say, option)
    return [Part(config, file) for file in files]


def text_hash(text: str) -> int:
    """64 bits, the same on every machine."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


# --- the standard library, and the installed packages ------------------------


def _builtin_files(config: DataConfig) -> list[Path]:
    """The same files in the same order on every machine with this Python (and these packages)."""
    paths = sysconfig.get_paths()
    files = [
        (name, file)
        for name, file in _python_files(Path(paths["stdlib"]))
        if not LEFT_OUT_OF_BUILTIN.intersection(Path(name).parts)
    ]
    if not config.subset:
        return [file for _, file in sorted(files)]
    for folder in {Path(paths[kind]).resolve() for kind in ("purelib", "platlib")}:
        files += _python_files(folder)
    # Sorting by a hash of the name mixes the packages: the first data.max_documents files are a
    # sample of all packages.
    mixed = [file for _, file in sorted((text_hash(name), file) for name, file in files)]
    return _without_copies(mixed, config.max_documents)


def _python_files(folder: Path) -> list[tuple[str, Path]]:
    """(name, file) of each Python file below a folder. The name is relative to the folder, with
    posix separators, so that it sorts the same everywhere.
    """
    files = (file for file in folder.rglob("*.py") if file.is_file())
    return [(file.relative_to(folder).as_posix(), file) for file in files]


def _without_copies(files: list[Path], most: int) -> list[Path]:
    """The first `most` files (0: all) that hold text that no file before them holds: packages hold
    copies of each other's files.
    """
    seen: dict[int, Path] = {}
    for file in files:
        text = python_text(file)
        if text and not text.isspace():
            seen.setdefault(text_hash(text), file)
        if most and len(seen) == most:
            break
    return list(seen.values())


def python_text(file: Path) -> str | None:
    """The text of a Python file; None if it is not UTF-8, as a few tests of the standard library
    are on purpose.
    """
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


# --- local files -------------------------------------------------------------


def local_files(
    config: DataConfig, say: Say = say_on_stderr, option: str = "data.path"
) -> list[Path]:
    """The files that `config.path` names, sorted, each once, however many links lead to it. A
    folder stands for all files below it, also behind links, that are not hidden and, for jsonl and
    parquet, have one of the source's suffixes.

    Raises UserError if there are none, and for a folder or link below the path that cannot be read.
    """
    path, suffixes = Path(config.path).expanduser(), SUFFIXES.get(config.source, ("",))
    wanted = f" ending in {', '.join(suffixes)}" if any(suffixes) else ""
    files, others = set(), set()
    try:
        for place in [path] if path.exists() else _matches(path):
            if place.is_file():
                files.add(place)
            for folder, names in _folders(place) if place.is_dir() else ():
                kept = {folder / name for name in names if name.lower().endswith(suffixes)}
                files |= {file for file in kept if stat.S_ISREG(file.stat().st_mode)}
                others |= {folder / name for name in names} - kept
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror})"
        raise UserError(f"{problem}: give access to it, or leave it out") from None
    if not files:
        raise UserError(
            f"{option}: {config.path!r} is no file, no folder that holds a file{wanted}, and no "
            "glob that matches one; correct the path"
        )
    if others := sorted(others - files):
        number = f"{len(others):,}, such as {others[0]}"
        say(f"left out of {config.path}: files not{wanted} ({number})")
    once: dict[str, Path] = {}
    for file in sorted(files, key=Path.as_posix):
        once.setdefault(os.path.realpath(file), file)
    return list(once.values())


def _folders(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder from `top` down, also behind links, and the names of its files; without those
    that are hidden. Links may lead in circles: a folder comes once.
    """

    def refuse(error: OSError) -> None:
        raise error

    seen = set()
    for folder, folders, names in os.walk(top, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        if {"state.json", "dataset_info.json"}.issubset(names):
            raise UserError(
                f"{folder} was written by save_to_disk of datasets: give data.source=hub "
                f"data.path={folder} (eval.py: --hub {folder})"
            )
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(folder), [name for name in names if not name.startswith(".")]


def _matches(pattern: Path) -> list[Path]:
    """What a glob matches. Unlike in the module glob, a folder that cannot be read is an error, and
    ** follows links.
    """
    places = [Path(pattern.anchor)]
    for part in pattern.relative_to(pattern.anchor).parts:
        if part == "**":
            places = [folder for place in places for folder, _ in _folders(place)]
        elif glob.has_magic(part):
            folders = filter(Path.is_dir, places)
            inside = [(place, fnmatch.filter(os.listdir(place), part)) for place in folders]
            places = [place / name for place, names in inside for name in names]
            places = [place for place in places if part[0] == "." or place.name[0] != "."]
        else:
            places = [place / part for place in places if (place / part).exists()]
    return places
