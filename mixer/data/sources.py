"""Where documents come from: the parts of a source, which are files or a dataset of the hub, and
the texts of a part.

The parts, one after the other, give the texts in an order that does not change. Rows are read as a
stream.
"""

import bz2
import codecs
import fnmatch
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mixer.common.errors import UserError, first_line, say_on_stderr
from mixer.data.config import DataConfig

BETWEEN = "\0"  # the two texts of a pair, of which the first has none
PARQUET_ROWS = 256  # read at once
ROWS_WITHOUT_FIELD = 1000  # a part that begins with this many has another field for its text
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


def source_parts(config: DataConfig) -> list[Part]:
    """The parts of the source, in order. Raises UserError if there are none."""
    if config.source == "hub":
        return [Part(config)]
    files = _builtin_files(config) if config.source == "builtin" else local_files(config)
    return [Part(config, file) for file in files]


def part_texts(part: Part) -> Iterator[str | None]:
    """The text of each row or file of a part; None where there is none: a row without the text
    field, a file of the builtin source that is not UTF-8. An empty line is an empty text.

    Raises UserError for text that is not UTF-8, a part in which no row has the text field, a field
    that is not text, and whatever else cannot be read.
    """
    number = 1
    try:
        for text in READERS[part.config.source](part):
            if not isinstance(text, str | None):
                raise UserError(
                    f"field {part.config.text_field!r} of row {number} of {part.name} holds "
                    f"{type(text).__name__}, not text; give a field of text as data.text_field "
                    "(eval.py: --text-field)"
                )
            if text:
                text.encode()  # half of a surrogate pair, which JSON can spell, is no text
            yield text
            number += 1
    except UserError:
        raise
    except Exception as error:  # datasets, pyarrow, json, zlib, the network: each has its own kinds
        remedy = "correct it (iconv converts text to UTF-8), or copy it again if it is cut short"
        if part.config.source == "hub":
            remedy = "check its names and the network; for .zst files, pip install backports.zstd"
            if os.path.exists(part.config.path):
                remedy = "your own files need data.source=text, jsonl or parquet (eval.py: --text)"
        place = f"row {number} of {part.name}"
        raise UserError(f"cannot read {place}: {first_line(error)}; {remedy}") from error


# --- files, compressed or not ------------------------------------------------


def _open_zst(file: Path, mode: str) -> BinaryIO:
    import pyarrow  # it comes with `datasets`

    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))


OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}
SUFFIXES = {
    "jsonl": tuple(n + how for n in (".jsonl", ".json", ".ndjson") for how in ("", *OPENERS)),
    "parquet": (".parquet",),
}


def _open(file: Path) -> BinaryIO:
    """Opens a file for reading; a compressed one, which its suffix shows, as what it holds."""
    return OPENERS.get(file.suffix.lower(), open)(file, "rb")


def local_files(config: DataConfig) -> list[Path]:
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
            f"{config.path!r} is no file, no folder that holds a file{wanted}, and no "
            "glob that matches one; correct the path"
        )
    if others := sorted(others - files):
        number = f"{len(others):,}, such as {others[0]}"
        say_on_stderr(f"left out of {config.path}: files not{wanted} ({number})")
    last_first = sorted(files, key=Path.as_posix, reverse=True)
    once = {os.path.realpath(file): file for file in last_first}
    return sorted(once.values(), key=Path.as_posix)


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
    """What a glob matches. Unlike in the module glob, a folder that cannot be read is an error."""
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


def _file_text(part: Part) -> Iterator[str]:
    with _open(part.file) as file:
        yield file.read().decode("utf-8")  # bytes, not text mode: line ends stay as they are


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
    mixed = sorted((text_hash(name), file) for name, file in files)
    seen: dict[int, Path] = {}  # packages hold copies of each other's files
    for _, file in mixed:
        text = _python_text(file)
        if text and not text.isspace():
            seen.setdefault(text_hash(text), file)
        if len(seen) == config.max_documents > 0:
            break
    return list(seen.values())


def _python_files(folder: Path) -> list[tuple[str, Path]]:
    """(name, file) of each Python file below a folder. The name is relative to the folder, with
    posix separators, so that it sorts the same everywhere.
    """
    files = (file for file in folder.rglob("*.py") if file.is_file())
    return [(file.relative_to(folder).as_posix(), file) for file in files]


def _python_text(file: Path) -> str | None:
    """None if it is not UTF-8, as a few tests of the standard library are on purpose."""
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def text_hash(text: str) -> int:
    """64 bits, the same on every machine."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


# --- rows: jsonl, parquet, hub -----------------------------------------------


def _field_texts(part: Part, rows: Iterable[object]) -> Iterator[str | None]:
    """The text field of each row, or both of its pair of texts; "" for an empty row."""
    fields, found = (), False
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"it holds {type(row).__name__}, not an object")
        fields, found = fields or row.keys(), found or part.config.text_field in row
        if fields and not found and number >= ROWS_WITHOUT_FIELD:
            break
        yield _text(row, part.config) if row else ""
    if fields and not found:
        raise UserError(
            f"{part.name} has no field {part.config.text_field!r}; its fields: "
            f"{', '.join(sorted(fields))}. Give one of them as data.text_field "
            "(eval.py: --text-field)"
        )


def _text(row: dict, config: DataConfig) -> object:
    """What a row has in its text field; a pair as one text, if neither of the two lacks."""
    text, partner = row.get(config.text_field), row.get(config.pair_field)
    if not config.pair_field:
        return text
    lacking = [one for one in (text, partner) if not isinstance(one, str) or not one.strip()]
    return lacking[0] if lacking else text.replace(BETWEEN, " ") + BETWEEN + partner


def _json_texts(part: Part) -> Iterator[str | None]:
    """A row a line, or all of the file one array of rows."""
    with _open(part.file) as file:
        if file.peek(4).removeprefix(codecs.BOM_UTF8).startswith(b"["):
            rows = json.load(file)
        else:
            rows = (json.loads(line) if line.strip() else {} for line in file)
        yield from _field_texts(part, rows)


def _parquet_texts(part: Part) -> Iterator[str | None]:
    from pyarrow.parquet import ParquetFile

    wanted = [part.config.text_field, part.config.pair_field]
    with ParquetFile(part.file) as file:
        has_text = wanted[0] in file.schema_arrow.names
        batches = file.iter_batches(PARQUET_ROWS, columns=wanted if has_text else None)
        yield from _field_texts(part, (row for batch in batches for row in batch.to_pylist()))


def _hub_texts(part: Part) -> Iterator[str | None]:
    from datasets import load_dataset

    path, split = part.config.path, part.config.split
    if Path(path, "state.json").is_file():  # written by save_to_disk, which knows no splits
        files = {split: f"{glob.escape(path)}/*.arrow"}
        rows = load_dataset("arrow", data_files=files, split=split, streaming=True)
    else:
        rows = load_dataset(path, part.config.subset or None, split=split, streaming=True)
    yield from _field_texts(part, rows)


READERS = {
    "builtin": lambda part: [_python_text(part.file)],
    "text": _file_text,
    "jsonl": _json_texts,
    "parquet": _parquet_texts,
    "hub": _hub_texts,
}
