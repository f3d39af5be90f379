"""Where documents come from: each source is cut into shards, which processes can read (readers.py)
independently of each other.

The shards of a source, one after the other, give its documents in an order that does not change.
Nothing that is written may depend on where one shard ends and the next begins.
"""

import bz2
import codecs
import fnmatch
import functools
import glob
import gzip
import hashlib
import io
import lzma
import os
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mixer.common.errors import Interrupted, UserError, first_line, is_refusal
from mixer.common.say import Say, say_on_stderr
from mixer.data.config import DataConfig


def _open_zst(file: Path, mode: str) -> BinaryIO:
    import pyarrow  # it comes with `datasets`

    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))


OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}
SUFFIXES = {
    "jsonl": tuple(name + how for name in (".jsonl", ".json", ".ndjson") for how in ("", *OPENERS)),
    "parquet": (".parquet",),
}
LEFT_OUT_OF_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}
# Of text in a shard, where a source can be cut: enough for a worker to do something, and little to
# do again after a kill. Files of one document, compressed files and files of the hub can be longer.
SHARD_BYTES = 4 << 20
LONGEST_LINE = 1 << 30  # bytes; a line is held in memory


@dataclass(frozen=True)
class Shard:
    """A part of a source. start, stop: bytes of a jsonl file (stop = 0: it has no row a line); row
    groups of a parquet file; for the hub, the number of this part of the dataset and the number of
    all of them.
    """

    config: DataConfig
    files: tuple[Path, ...] = ()
    start: int = 0
    stop: int = 0
    bytes: int = 0  # on the disk, where that is known
    revision: str | None = None  # of a dataset of the hub

    @property
    def identity(self) -> tuple:
        """What shows whether the same shard was meant earlier, and whether its files changed."""
        stats = [file.stat() for file in self.files]
        files = [
            (str(file.absolute()), stat.st_size, stat.st_mtime_ns)
            for file, stat in zip(self.files, stats, strict=True)
        ]
        return files, self.start, self.stop, self.revision


def source_shards(config: DataConfig, say: Say = say_on_stderr) -> list[Shard]:
    """The shards of the source, in order. Raises UserError if it cannot be found or opened."""
    if config.source == "hub":
        return _hub_shards(config)
    builtin = config.source == "builtin"
    return file_shards(config, _builtin_files(config) if builtin else local_files(config, say))


def file_shards(config: DataConfig, files: list[Path]) -> list[Shard]:
    """`source_shards` for files of one kind, which `config.source` says."""
    if config.source in ("builtin", "text"):
        cuts = _cuts([file.stat().st_size for file in files])
        return [Shard(config, tuple(files[i:j]), bytes=size) for i, j, size in cuts]
    cut, shards = _jsonl_shards if config.source == "jsonl" else _parquet_shards, []
    for file in files:
        try:
            shards += cut(config, file)
        except UserError:
            raise
        except Exception as error:
            raise cannot_read(str(file), config, error) from error
    return shards


def _cuts(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, size) of consecutive parts, together of about SHARD_BYTES."""
    start, size = 0, 0
    for stop, more in enumerate(sizes, 1):
        size += more
        if size >= SHARD_BYTES or stop == len(sizes):
            yield start, stop, size
            start, size = stop, 0


def cannot_read(where: str, config: DataConfig, error: Exception) -> UserError:
    """The error for what a library raised: datasets, pyarrow, json, zlib and the network each have
    kinds of their own.
    """
    remedy = "correct the file, or copy it again if it is cut short"
    if config.source == "hub":
        remedy = "check these names and the network; for .zst files, pip install backports.zstd"
    kind = Interrupted if config.source == "hub" or is_refusal(error) else UserError
    return kind(f"cannot read {where}: {first_line(error)}; {remedy}")


def open_file(file: Path) -> BinaryIO:
    """Opens a file for reading; a compressed one, which its suffix shows, as what it holds."""
    return OPENERS.get(file.suffix.lower(), open)(file, "rb")


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
    # Sorted by a hash of the name, which mixes the packages: any first data.max_documents are a
    # sample of all of them.
    mixed = [file for _, file in sorted((text_hash(name), file) for name, file in files)]
    return _without_copies(mixed, config.max_documents)


def _without_copies(files: list[Path], most: int) -> list[Path]:
    """The first `most` files (0: all) that hold text that no file before them holds: packages hold
    copies of each other's files.
    """
    seen: dict[int, Path] = {}
    for file in files:
        for text in decoded_files([file]):
            if text and not text.isspace():
                seen.setdefault(text_hash(text), file)
        if most and len(seen) == most:
            break
    return list(seen.values())


def _python_files(folder: Path) -> list[tuple[str, Path]]:
    """(name, file) of each Python file below a folder. The name is relative to the folder, with
    posix separators, so that it sorts the same everywhere.
    """
    files = (file for file in folder.rglob("*.py") if file.is_file())
    return [(file.relative_to(folder).as_posix(), file) for file in files]


def decoded_files(files: Iterable[Path]) -> Iterator[str | None]:
    """The text of each Python file; None for one that is not UTF-8, as a few tests of the standard
    library are on purpose.
    """
    for file in files:
        try:
            yield file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            yield None


# --- local files -------------------------------------------------------------


def local_files(config: DataConfig, say: Say = say_on_stderr) -> list[Path]:
    """The files that `path` names, sorted, each once, however many links lead to it. Of a folder:
    all below it, also behind links, that are not hidden and, for jsonl and parquet, have one of the
    source's suffixes.

    Raises UserError if there are none, and for a folder or link below `path` that cannot be read.
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
            f"{config.path!r} is no file, no folder that holds a file{wanted}, and no glob that "
            "matches one: correct the path"
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


# --- rows: jsonl, parquet, hub -----------------------------------------------


def _jsonl_shards(config: DataConfig, file: Path) -> Iterator[Shard]:
    """Ranges of bytes; of a compressed file, which cannot be entered anywhere, a single one."""
    size = file.stat().st_size
    with open_file(file) as opened:
        first = opened.readline(LONGEST_LINE).removeprefix(codecs.BOM_UTF8).strip()
    if not (first.startswith(b"{") and first.endswith(b"}")):
        yield Shard(config, (file,), bytes=size)
    elif file.suffix.lower() in OPENERS:
        yield Shard(config, (file,), 0, sys.maxsize, size)
    else:
        for start in range(0, size, SHARD_BYTES):
            stop = min(start + SHARD_BYTES, size)
            yield Shard(config, (file,), start, stop, stop - start)


def _parquet_shards(config: DataConfig, file: Path) -> list[Shard]:
    """Ranges of row groups."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        metadata, names = opened.metadata, opened.schema_arrow.names
    if config.text_field not in names:
        raise no_field(str(file), config.text_field, names)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    cuts = _cuts([group.total_byte_size for group in groups])
    return [Shard(config, (file,), start, stop, size) for start, stop, size in cuts]


def no_field(where: str, name: str, fields: Iterable[str]) -> UserError:
    """The error for rows that have other fields."""
    return UserError(
        f"{where} has no field {name!r}; its fields: {', '.join(sorted(fields))}. Give one of "
        "them as data.text_field (eval.py: --text-field)"
    )


def _hub_shards(config: DataConfig) -> list[Shard]:
    """A shard for each file of the dataset."""
    revision = _hub_revision(config.path)
    # Finds a wrong name, subset or split now, with the error that reading it would give.
    try:
        rows = open_dataset(config.path, config.subset, config.split, revision)
    except Exception:
        return [Shard(config, stop=1, revision=revision)]
    count = rows.num_shards if hasattr(rows, "shard") else 1  # datasets 3.0 has no shards
    return [Shard(config, (), part, count, revision=revision) for part in range(count)]


def _hub_revision(name: str) -> str | None:
    """The dataset's commit at this moment, so that all workers read the same. None for a local
    directory, and where the hub cannot be asked.
    """
    if Path(name).exists():
        return None
    try:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(name).sha
    except Exception:
        return None


@functools.lru_cache(maxsize=2)  # opening lists the files of the dataset, maybe over a network
def open_dataset(path: str, subset: str, split: str, revision: str | None):
    from datasets import load_dataset

    if Path(path, "state.json").is_file():  # written by save_to_disk, which knows no splits
        files = {split: f"{glob.escape(path)}/*.arrow"}
        return load_dataset("arrow", data_files=files, split=split, streaming=True)
    return load_dataset(path, subset or None, split=split, revision=revision, streaming=True)
