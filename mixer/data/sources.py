"""Where documents come from: local files, a dataset of the hub, or Python's standard library.

A document is one `str`: the content of a file, or the text of a row. Sources are read as a stream
and in an order that does not change, so memory use does not grow with the corpus.
"""

import bz2
import codecs
import fnmatch
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import shlex
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixer.common.errors import Say, UserError, first_line, say_on_stderr
from mixer.common.files import as_path, sha256
from mixer.data.config import FILE_SOURCES, DataConfig, existing_data, has_no_splits
from mixer.data.decoding import decoded

NO_ROW = {}  # of an empty line, which counts for the numbers of rows alone
BETWEEN = "\0"  # the two texts of a pair; the first one has no such character
MOST_MISSING = 0.1  # share of rows without the text field; with more, it is no field of all rows
MOST_BINARY = 0.5  # share of files that are no text; with more, another folder may be meant
FIRST_ROWS = 1000  # without a text in so many, a corpus is refused before it is read to its end
LEFT_OUT_OF_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}
# What to do about a row that cannot be read, by the error's type.
REMEDIES = {
    json.JSONDecodeError: "each line must hold an object, or the file one list of objects: jq -c . "
    "FILE writes an object on a line; if it is cut short, copy it again",
    UnicodeDecodeError: "convert it with iconv",
    Exception: "correct it, copy the file again if it is cut short, or give another "
    "data.text_field (eval.py: --text-field)",
}
WIDE_WINDOW = "too much memory for decoding"  # what the zstd library says
WIDE_REMEDY = "its window is above 128 MiB: zstd -d --long=31 FILE, and give what that writes"
HUB_REMEDY = "give the dataset's exact names, with a network; for .zst pip install backports.zstd"


@dataclass(frozen=True)
class Shard:
    """A file of a source, or all of a hub dataset."""

    config: DataConfig
    file: Path | None = None


def source_shards(config: DataConfig) -> list[Shard]:
    """The shards of the source, in order. Raises UserError if there are none, or if the rows of a
    file would become one document.
    """
    if config.source == "hub":
        return [Shard(config)]
    files = _builtin_files(config) if config.source == "builtin" else local_files(config)
    for file in files if config.source == "text" else ():
        source = source_of_rows(file)
        # .json is a text, too: of source code
        if source and not file.name.lower().endswith(_compressible(".json")):
            raise UserError(
                f"{file} has a document in each row, but data.source=text reads a file as one "
                f"document: give data.source={source}, or a glob that leaves the file out, "
                f"such as {example_glob(config.path)}"
            )
    return [Shard(config, file) for file in files]


def example_glob(path: str) -> str:
    """Of the texts in a folder of mixed files, as a shell takes it."""
    folder = path if as_path(path).is_dir() else "FOLDER"
    return "data.path=" + shlex.quote(f"{folder.rstrip('/')}/**/*.txt")


def documents(
    shards: Iterable[Shard], config: DataConfig, blank: bool = False, say: Say = say_on_stderr
) -> Iterator[str]:
    """The documents of the shards, the first `max_documents` of them. An empty text is none, nor is
    white space, except with `blank`. Says at the end how many rows and files are left out.

    Raises UserError for what cannot be read, too many of these rows or files, and no document.
    """
    count = 0
    missing = 0  # rows without text
    fields: list[str] = []  # of the first of them
    binary: list[Path] = []  # files that are no text
    empty = 0
    for text in itertools.chain.from_iterable(map(shard_texts, shards)):
        if isinstance(text, Path):
            binary.append(text)
            if len(binary) == FIRST_ROWS and not count:
                break
        elif isinstance(text, list):
            missing += 1
            fields = fields or text
            if missing == FIRST_ROWS and not count:
                break
        elif text and (blank or not text.isspace()):
            if count == config.max_documents > 0:
                say(f"data.max_documents = {count}: the text has more; 0 reads all of it")
                break
            count += 1
            yield text
        else:
            empty += 1
    if binary:
        files = count + len(binary)
        share = f"{len(binary):,} of {files:,} files of {config.path}"
        left_out = f"{share} are no text, such as {binary[0]}"
        if len(binary) > MOST_BINARY * files:
            remedy = f"give a glob of the texts, such as {example_glob(config.path)}"
            raise UserError(f"{left_out}; at most {MOST_BINARY:.0%} may be none: {remedy}")
        say(f"left out: {left_out}")
    if empty and config.source != "builtin":
        share = f"{empty:,} of {count + missing + len(binary) + empty:,} texts of {config.path}"
        say(f"left out: {share} are empty, or white space")
    rows = count + missing
    if not rows:
        raise UserError(f"the corpus is empty: no document with text in {config.path}")
    names = " or ".join(map(repr, filter(None, (config.text_field, config.pair_field))))
    left_out = f"{missing:,} of {rows:,} entries of {config.path} have no text in field {names}"
    if missing > MOST_MISSING * rows:
        raise UserError(
            f"{left_out}; fields of the first: {', '.join(fields)}; at most {MOST_MISSING:.0%} may "
            "lack text. Set data.text_field to a field that all rows have (eval.py: --text-field), "
            "or remove the other rows"
        )
    if missing:
        say(f"left out: {left_out}")


def shard_texts(shard: Shard) -> Iterator[str | list[str] | Path]:
    """The text of each row or file of a shard; of a row that lacks it, the names of its fields, of
    a file that is no text, its path.
    """
    config = shard.config
    number = 1
    try:
        for row in _rows(shard):
            if row is not NO_ROW:
                yield _text(row, config)
            number += 1
    except UserError:
        raise
    except Exception as error:  # datasets, pyarrow, json, zlib, the network: each has its own kinds
        dataset = " ".join(filter(None, (config.path, config.subset, config.split)))
        location = f"row {number} of {shard.file or f'hub dataset {dataset}'}"
        if not shard.file:
            remedy = HUB_REMEDY
        elif WIDE_WINDOW in str(error):
            remedy = WIDE_REMEDY
        else:
            remedy = next(REMEDIES[type_] for type_ in REMEDIES if isinstance(error, type_))
        raise UserError(f"cannot read {location}: {first_line(error)}; {remedy}") from error


def _text(row: object, config: DataConfig) -> str | list[str] | Path:
    """The text of a row, of a pair both in one; the names of its fields where it lacks one. A path
    stays.
    """
    if isinstance(row, Path):
        return row
    if not isinstance(row, dict):
        raise ValueError(f"it holds {type(row).__name__}, not an object")
    names = filter(None, (config.text_field, config.pair_field))
    texts: list[Any] = [row.get(name) for name in names]
    if None in texts:
        return sorted(row)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"the field for the text holds {type(text).__name__}, not text")
        text.encode()  # half of a surrogate pair, which JSON can spell, is no text
    if not config.pair_field:
        return texts[0]
    if not all(map(str.strip, texts)):
        return ""
    return texts[0].replace(BETWEEN, " ") + BETWEEN + texts[1]


def texts_of(document: str, is_pair: bool) -> list[str]:
    """The texts that a document is made of: itself, or query and target."""
    return document.split(BETWEEN, 1) if is_pair else [document]


def text_hash(text: str) -> int:
    """64 bits, the same on every machine."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


# --- the rows of a shard, each a dict ----------------------------------------


def _rows(shard: Shard) -> Iterable[object]:
    if shard.file is None:
        return _hub_rows(shard.config)
    return READERS[shard.config.source](shard.file, shard.config)


Opened = io.BufferedReader | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile


def _open_zst(file: Path, mode: str) -> Opened:
    import pyarrow  # it comes with `datasets`

    # Opened here, where a name need not be UTF-8.
    return io.BufferedReader(pyarrow.input_stream(open(file, "rb"), compression="zstd"))


OPENERS: dict[str, Callable[..., Opened]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


def _compressible(*suffixes: str) -> tuple[str, ...]:
    """The suffixes, alone and before that of a compression."""
    return tuple(suffix + opener for suffix in suffixes for opener in ("", *OPENERS))


SUFFIXES = {"jsonl": _compressible(".jsonl", ".json", ".ndjson"), "parquet": (".parquet",)}


def source_of_rows(file: Path) -> str:
    """The source that reads a file whose rows are documents; "" of other files."""
    name = file.name.lower()
    return next((source for source in SUFFIXES if name.endswith(SUFFIXES[source])), "")


def _open(file: Path) -> Opened:
    """Opens a file for reading; a compressed one, which its suffix shows, as what it holds."""
    opener = OPENERS.get(file.suffix.lower())
    return opener(file, "rb") if opener else open(file, "rb")


def _text_row(file: Path, config: DataConfig) -> Iterator[dict | Path]:
    with _open(file) as opened:  # bytes, not text mode: line ends stay as they are
        data = opened.read()
    text = decoded(data, file)
    yield file if text is None else {config.text_field: text}


def _builtin_row(file: Path, config: DataConfig) -> Iterator[dict]:
    with suppress(UnicodeDecodeError):  # a few tests of Python are not UTF-8 on purpose
        yield {config.text_field: file.read_bytes().decode("utf-8-sig")}


def _json_rows(file: Path, config: DataConfig) -> Iterator[object]:
    """A row a line, or all of the file one array of rows."""
    with _open(file) as opened:
        if opened.peek(4).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from json.load(opened)
        else:
            yield from (json.loads(line) if line.strip() else NO_ROW for line in opened)


def _parquet_rows(file: Path, config: DataConfig) -> Iterator[dict]:
    from pyarrow.parquet import ParquetFile

    with open(file, "rb") as opened, ParquetFile(opened) as table:
        # Without the text field, an error names those that there are.
        has_text = config.text_field in table.schema_arrow.names
        columns = [config.text_field, config.pair_field] if has_text else None
        for batch in table.iter_batches(256, columns=columns):
            yield from batch.to_pylist()


def _hub_rows(config: DataConfig) -> Iterable[object]:
    from datasets import load_dataset, load_from_disk

    path = as_path(config.path)
    if has_no_splits(config.path):
        return load_from_disk(path)
    if (path / "dataset_dict.json").is_file():  # written by save_to_disk with splits
        return load_from_disk(path / config.split)
    return load_dataset(str(path), config.subset or None, split=config.split, streaming=True)


READERS = {
    "builtin": _builtin_row,
    "text": _text_row,
    "jsonl": _json_rows,
    "parquet": _parquet_rows,
}


# --- files -------------------------------------------------------------------


def check_data(config: DataConfig) -> None:
    """Raises UserError for data that is not prepared and cannot be, as far as paths tell."""
    if config.source in FILE_SOURCES and existing_data(config) is None:
        for name in filter(None, (config.path, config.validation_path)):
            check_path(name)


def check_path(name: str) -> None:
    """Raises UserError for a file, folder or glob that there is not."""
    path = as_path(name)
    if not path.exists() and not (glob.has_magic(name) and _matches(path)):
        problem = "matches no file" if glob.has_magic(name) else "does not exist"
        raise UserError(f"{name!r} {problem}: correct the path")


def local_files(config: DataConfig) -> list[Path]:
    """The files that `config.path` names, sorted, each once, however many links lead to it. A
    folder stands for all files below it, also behind links, that are not hidden and, for jsonl and
    parquet, have one of the source's suffixes. Raises UserError if none, or not all, can be read.
    """
    path = as_path(config.path)
    suffixes = SUFFIXES.get(config.source, ("",))
    ending = f" ending in {', '.join(suffixes)}" if any(suffixes) else ""
    named: set[Path] = set()
    inside: set[Path] = set()  # folders
    try:
        check_path(config.path)
        for match in [path] if path.exists() else _matches(path):
            if match.is_file():
                named.add(match)
            elif match.is_dir():
                inside |= {folder / name for folder, names in _folders(match) for name in names}
        with_suffix = {file for file in inside if file.name.lower().endswith(suffixes)}
        files = named | {file for file in with_suffix if stat.S_ISREG(file.stat().st_mode)}
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror})"
        raise UserError(f"{problem}: give access to it, or leave it out") from None
    if not files:
        if path.is_dir():
            problem = f"is a folder without files{ending}"
        elif glob.has_magic(config.path):
            problem = f"matches no file{ending}"
        else:
            problem = "is no file, but a pipe or device"
        raise UserError(f"{config.path!r} {problem}: correct the path")
    if left_out := sorted(inside - with_suffix - named):
        number = f"{len(left_out):,}, such as {left_out[0]}"
        say_on_stderr(f"left out of {config.path}: files not{ending} ({number})")
    once = {os.path.realpath(file): file for file in sorted(files, key=Path.as_posix)[::-1]}
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
        if {"state.json", "dataset_info.json"}.issubset(names) or "dataset_dict.json" in names:
            raise UserError(
                f"{folder} was written by save_to_disk of datasets: give data.source=hub "
                f"data.path={folder} (eval.py: --hub {folder})"
            )
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield Path(folder), [name for name in names if name[0] != "."]


def _matches(pattern: Path) -> list[Path]:
    """What a glob matches. Unlike in the module glob, a folder that cannot be read is an error."""
    paths = [Path(pattern.anchor)]
    for segment in pattern.relative_to(pattern.anchor).parts:
        if segment == "**":
            paths = [folder for path in paths for folder, _ in _folders(path)]
        elif glob.has_magic(segment):
            entries = [path / name for path in paths if path.is_dir() for name in os.listdir(path)]
            if segment[0] != ".":
                entries = [entry for entry in entries if entry.name[0] != "."]
            paths = [entry for entry in entries if fnmatch.fnmatch(entry.name, segment)]
        else:
            paths = [path / segment for path in paths if (path / segment).exists()]
    return paths


def _builtin_files(config: DataConfig) -> list[Path]:
    """The same files in the same order on every machine with this Python (and these packages)."""
    paths = sysconfig.get_paths()
    named = [
        (name, file)
        for name, file in _python_files(paths["stdlib"])
        if not LEFT_OUT_OF_BUILTIN.intersection(Path(name).parts)
    ]
    if not config.subset:
        return [file for _, file in sorted(named)]
    for folder in {os.path.realpath(paths["purelib"]), os.path.realpath(paths["platlib"])}:
        named += _python_files(folder)
    # Sorting by a hash of the name mixes the packages: the first data.max_documents files are a
    # sample of all packages. They hold copies of each other's files.
    once: dict[str, Path] = {}
    for _, file in sorted((text_hash(name), file) for name, file in named):
        once.setdefault(sha256(file), file)
    return list(once.values())


def _python_files(folder: str) -> list[tuple[str, Path]]:
    """(name, file) of each; names relative to the folder sort the same everywhere."""
    files = (file for file in Path(folder).rglob("*.py") if file.is_file())
    return [(file.relative_to(folder).as_posix(), file) for file in files]
