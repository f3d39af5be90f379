"""The texts of a shard, read as its source stores them: a text a file, or a text a row."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from mixer.common.errors import UserError
from mixer.data import sources
from mixer.data.sources import LONGEST_LINE, Shard, open_file

PARQUET_ROWS = 256  # read at once
BLOCK = 1 << 20  # bytes
WHITE_SPACE = re.compile(r"\s*")


def shard_texts(shard: Shard) -> Iterator[str | None]:
    """The text of each row or file of a shard; None where there is none: a row without the text
    field, a file of the builtin source that is not UTF-8.

    Raises UserError for text that is not UTF-8, a first part of a file in which no row has the text
    field, a field that is not text, and whatever else cannot be read.
    """
    number = 1  # of the row that is being read
    try:
        for text in READERS[shard.config.source](shard):
            if not isinstance(text, str | None):
                raise UserError(
                    f"field {shard.config.text_field!r} of {_place(shard, number)} holds "
                    f"{type(text).__name__}, not text; give a field of text as data.text_field "
                    "(eval.py: --text-field)"
                )
            if text:
                text.encode()  # half of a surrogate pair, which JSON can spell, is no text
            yield text
            number += 1
    except UserError:
        raise
    except Exception as error:
        raise sources.cannot_read(_place(shard, number), shard.config, error) from error


def _place(shard: Shard, number: int) -> str:
    """Names row or file `number` (from 1) of a shard."""
    config = shard.config
    if config.source == "hub":
        name = " ".join(filter(None, (config.path, config.subset, config.split)))
        return f"row {number} of part {shard.start + 1} of {shard.stop} of hub dataset {name}"
    if config.source in ("builtin", "text"):
        return str(shard.files[number - 1])
    file = shard.files[0]
    if config.source == "parquet":
        return f"row {number} from row group {shard.start} of {file}"
    if not shard.stop:
        return f"row {number} of {file}"
    with open(file, "rb") as opened:
        left = _to_line(opened, shard)
        opened.seek(0)
        while left and (block := opened.read(min(left, BLOCK))):
            left -= len(block)
            number += block.count(b"\n")
    return f"line {number} of {file}"


# --- a text a file -----------------------------------------------------------


def _file_texts(shard: Shard) -> Iterator[str]:
    for file in shard.files:
        with open_file(file) as opened:
            raw = opened.read()  # bytes, not text mode: line ends stay as they are
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}. "
                f"Convert it (for example `iconv -f LATIN1 -t UTF-8 {file}`), or leave it out"
            ) from None


# --- a text a row: jsonl, parquet, hub ---------------------------------------


def _field_texts(shard: Shard, rows: Iterator[dict]) -> Iterator[str | None]:
    """The text field of each row; "" for an empty row, as which an empty line counts."""
    name, fields, found = shard.config.text_field, (), False
    for row in rows:
        fields, found = fields or row.keys(), found or name in row
        yield row.get(name) if row else ""
    if fields and not found and not shard.start:
        raise sources.no_field(_place(shard, 1), name, fields)


def _json_texts(shard: Shard) -> Iterator[str | None]:
    rows = _line_rows(shard) if shard.stop else _value_rows(shard.files[0])
    return _field_texts(shard, map(_object, rows))


def _object(row: object) -> dict:
    if not isinstance(row, dict):
        raise ValueError(f"it holds {type(row).__name__}, not an object")
    return row


def _line_rows(shard: Shard) -> Iterator:
    """The values of the lines that begin in a range of bytes."""
    with open_file(shard.files[0]) as file:
        place = _to_line(file, shard)
        while place < shard.stop and (line := _read(file.readline)):
            place += len(line)
            yield json.loads(line) if line.strip() else {}


def _value_rows(path: Path) -> Iterator:
    """The rows of a file without a row a line: an array of them, or objects of several lines."""
    with open_file(path) as file:
        text = _read(file.read).decode("utf-8-sig").rstrip()
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        value, place = decoder.raw_decode(text, WHITE_SPACE.match(text, place).end())
        yield from value if isinstance(value, list) else [value]


def _read(read: Callable[[int], bytes]) -> bytes:
    data = read(LONGEST_LINE + 1)
    if len(data) > LONGEST_LINE:
        raise ValueError(f"it has more than {LONGEST_LINE >> 20} MiB, give a row a line")
    return data


def _to_line(file: BinaryIO, shard: Shard) -> int:
    """Moves to the first line that begins in the shard, and returns where that is."""
    if not shard.start:
        return 0
    place = file.seek(shard.start - 1)
    while place < shard.stop and (part := file.readline(BLOCK)):
        place += len(part)
        if part.endswith(b"\n"):
            break
    return place


def _parquet_texts(shard: Shard) -> Iterator[str | None]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(shard.files[0]) as file:
        groups = range(shard.start, shard.stop)
        for batch in file.iter_batches(PARQUET_ROWS, groups, [shard.config.text_field]):
            yield from (text.as_py() for text in batch.column(0))


def _hub_texts(shard: Shard) -> Iterator[str | None]:
    config = shard.config
    try:
        rows = sources.open_dataset(config.path, config.subset, config.split, shard.revision)
        if shard.stop > 1:
            rows = rows.shard(num_shards=shard.stop, index=shard.start)
        yield from _field_texts(shard, rows)
    except StopIteration:  # how `datasets` says that the files hold no row at all
        return


READERS = {
    "builtin": lambda shard: sources.decoded_files(shard.files),
    "text": _file_texts,
    "jsonl": _json_texts,
    "parquet": _parquet_texts,
    "hub": _hub_texts,
}
