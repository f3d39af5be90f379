"""The texts of a part of a source: a text a file, or a text a row. All are read as a stream, except
for the file of a `text` source, which is one document.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from mixer.common.errors import Interrupted, UserError, first_line, is_refusal
from mixer.data.config import DataConfig
from mixer.data.sources import BETWEEN, COMPRESSED, Part, open_dataset, python_text

LONGEST_LINE = 1 << 30  # bytes; a line is held in memory
PARQUET_ROWS = 256  # read at once
ROWS_WITHOUT_FIELD = 1000  # a file that begins with this many has another field for its text
WHITE_SPACE = re.compile(r"\s*")


def part_texts(part: Part) -> Iterator[str | None]:
    """The text of each row or file of a part; None where there is none: a row without the text
    field, a file of the builtin source that is not UTF-8. An empty line is an empty text.

    Raises UserError for text that is not UTF-8, a file in which no row has the text field, a field
    that is not text, and whatever else cannot be read.
    """
    config, number, unit = part.config, 1, "row"

    def place() -> str:
        is_one_text = config.source in ("builtin", "text")
        return part.name if is_one_text else f"{unit} {number} of {part.name}"

    try:
        read = READERS[config.source]
        if config.source == "jsonl" and _has_row_a_line(part.file):
            read, unit = _line_texts, "line"
        for text in read(part):
            if not isinstance(text, str | None):
                raise UserError(
                    f"field {config.text_field!r} of {place()} holds {type(text).__name__}, not "
                    "text; give a field of text as data.text_field (eval.py: --text-field)"
                )
            if text:
                text.encode()  # half of a surrogate pair, which JSON can spell, is no text
            yield text
            number += 1
    except UserError:
        raise
    except Exception as error:
        raise _cannot_read(place(), config, error) from error


def _cannot_read(place: str, config: DataConfig, error: Exception) -> UserError:
    """The error for what a library raised: datasets, pyarrow, json, zlib and the network each have
    kinds of their own.
    """
    remedy = "correct the file, or copy it again if it is cut short"
    if config.source == "hub":
        remedy = "check these names and the network; for .zst files, pip install backports.zstd"
    kind = Interrupted if config.source == "hub" or is_refusal(error) else UserError
    return kind(f"cannot read {place}: {first_line(error)}; {remedy}")


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
        raw = file.read()  # bytes, not text mode: line ends stay as they are
    try:
        yield raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{part.file} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}. "
            f"Convert it (for example `iconv -f LATIN1 -t UTF-8 {part.file}`), or leave it out"
        ) from None


# --- rows: jsonl, parquet, hub -----------------------------------------------


def _field_texts(part: Part, rows: Iterable[object]) -> Iterator[str | None]:
    """The text field of each row, or both of its pair of texts; "" for an empty row."""
    name, fields, seen, found = part.config.text_field, (), 0, False
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"it holds {type(row).__name__}, not an object")
        fields, seen, found = fields or row.keys(), seen + bool(row), found or name in row
        if seen > ROWS_WITHOUT_FIELD and not found:
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


def _has_row_a_line(path: Path) -> bool:
    with _open(path) as file:
        first = file.readline(LONGEST_LINE).removeprefix(codecs.BOM_UTF8).strip()
    return first.startswith(b"{") and first.endswith(b"}")


def _line_texts(part: Part) -> Iterator[str | None]:
    with _open(part.file) as file:
        lines = iter(lambda: _read(file.readline), b"")
        yield from _field_texts(part, (json.loads(line) if line.strip() else {} for line in lines))


def _value_texts(part: Part) -> Iterator[str | None]:
    """Of a JSON file without a row a line: an array of rows, or rows of several lines."""

    def rows() -> Iterator:
        with _open(part.file) as file:
            text = _read(file.read).decode("utf-8-sig").rstrip()
        decoder, place = json.JSONDecoder(), 0
        while place < len(text):
            value, place = decoder.raw_decode(text, WHITE_SPACE.match(text, place).end())
            yield from value if isinstance(value, list) else [value]

    return _field_texts(part, rows())


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
    config = part.config
    try:
        rows = open_dataset(config.path, config.subset, config.split)
        if part.count > 1:
            rows = rows.shard(num_shards=part.count, index=part.number)
        yield from _field_texts(part, rows)
    except StopIteration:  # how `datasets` says that the files hold no row at all
        return


READERS = {
    "builtin": lambda part: [python_text(part.file)],
    "text": _file_text,
    "jsonl": _value_texts,
    "parquet": _parquet_texts,
    "hub": _hub_texts,
}
