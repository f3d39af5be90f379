"""The texts of a part of a source: a text a file, or a text a row. Rows are read as a stream."""

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from mixer.common.errors import UserError, first_line
from mixer.data.config import DataConfig
from mixer.data.sources import BETWEEN, COMPRESSED, Part, python_text

LONGEST_LINE = 1 << 30  # bytes; a line is held in memory
PARQUET_ROWS = 256  # read at once
ROWS_WITHOUT_FIELD = 1000  # a file that begins with this many has another field for its text


def part_texts(part: Part) -> Iterator[str | None]:
    """The text of each row or file of a part; None where there is none: a row without the text
    field, a file of the builtin source that is not UTF-8. An empty line is an empty text.

    Raises UserError for text that is not UTF-8, a file in which no row has the text field, a field
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
        place = f"row {number} of {part.name}"
        raise UserError(f"cannot read {place}: {first_line(error)}; {remedy}") from error


# --- files, compressed or not ------------------------------------------------


def _open_zst(file: Path, mode: str) -> BinaryIO:
    import pyarrow  # it comes with `datasets`

    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))


OPENERS = dict(zip(COMPRESSED, (gzip.open, bz2.open, lzma.open, _open_zst), strict=True))


def _open(file: Path) -> BinaryIO:
    """Opens a file for reading; a compressed one, which its suffix shows, as what it holds."""
    return OPENERS.get(file.suffix.lower(), open)(file, "rb")


def _read(read: Callable[[int], bytes]) -> bytes:
    data = read(LONGEST_LINE + 1)
    if len(data) > LONGEST_LINE:
        raise ValueError(f"it has more than {LONGEST_LINE >> 20} MiB, give a row a line")
    return data


def _file_text(part: Part) -> Iterator[str]:
    with _open(part.file) as file:
        yield file.read().decode("utf-8")  # bytes, not text mode: line ends stay as they are


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
        raise _no_field(part, fields)


def _text(row: dict, config: DataConfig) -> object:
    """What a row has in its text field; a pair as one text, if neither of the two lacks."""
    text, partner = row.get(config.text_field), row.get(config.pair_field)
    if not config.pair_field:
        return text
    lacking = [one for one in (text, partner) if not isinstance(one, str) or not one.strip()]
    return lacking[0] if lacking else text.replace(BETWEEN, " ") + BETWEEN + partner


def _no_field(part: Part, fields: Iterable[str]) -> UserError:
    return UserError(
        f"{part.name} has no field {part.config.text_field!r}; its fields: "
        f"{', '.join(sorted(fields))}. Give one of them as data.text_field (eval.py: --text-field)"
    )


def _json_texts(part: Part) -> Iterator[str | None]:
    """A row a line, or all of the file one array of rows."""
    with _open(part.file) as file:
        is_array = file.read(10).removeprefix(codecs.BOM_UTF8).startswith(b"[")
    with _open(part.file) as file:
        lines = iter(lambda: _read(file.readline), b"")
        rows = (json.loads(line) if line.strip() else {} for line in lines)
        if is_array:
            rows = json.loads(_read(file.read))
        yield from _field_texts(part, rows)


def _parquet_texts(part: Part) -> Iterator[str | None]:
    from pyarrow.parquet import ParquetFile

    config = part.config
    names = [config.text_field, *filter(None, [config.pair_field])]
    with ParquetFile(part.file) as file:
        if config.text_field not in file.schema_arrow.names:
            raise _no_field(part, file.schema_arrow.names)
        for batch in file.iter_batches(PARQUET_ROWS, columns=names):
            yield from (_text(row, config) for row in batch.to_pylist())


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
    "builtin": lambda part: [python_text(part.file)],
    "text": _file_text,
    "jsonl": _json_texts,
    "parquet": _parquet_texts,
    "hub": _hub_texts,
}
