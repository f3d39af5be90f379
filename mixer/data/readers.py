"""The texts of a shard, read as its source stores them: a text a file, or a text a row."""

import glob
import json
from collections.abc import Iterator
from pathlib import Path

from mixer.common.errors import UserError
from mixer.data.sources import Shard, decoded_files, open_dataset

PARQUET_ROWS = 256  # read at once


def shard_texts(shard: Shard) -> Iterator[str]:
    """The text of each row or file of a shard. Raises UserError for text that is not UTF-8, a
    missing text field, and files that cannot be read.
    """
    source = shard.config.source
    if source == "builtin":
        return decoded_files(shard.files)
    if source == "text":
        return map(_read_text, shard.files)
    if source == "jsonl" and shard.stop:
        return _field_texts(shard, _jsonl_rows(shard))
    if source == "parquet":
        return _field_texts(shard, _parquet_rows(shard))
    return _field_texts(shard, _dataset_rows(shard))


def _read_text(file: Path) -> str:
    raw = file.read_bytes()  # bytes, not text mode: line ends stay as they are
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}. "
            f"Convert it (for example `iconv -f LATIN1 -t UTF-8 {file}`), or leave it out"
        ) from None


def _field_texts(shard: Shard, rows: Iterator[dict]) -> Iterator[str]:
    """The text field of each row; "" where a row has none. Raises UserError if no row of a file's
    first shard has the field, for a field that is not text, and for whatever goes wrong in reading.
    """
    name, fields, found = shard.config.text_field, (), False
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            fields, found = fields or row.keys(), found or name in row
            text = row.get(name)
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"{_what(shard)}: field {name!r} of {_place(shard, number)} holds "
                    f"{type(text).__name__}, not text; give a field of text as data.text_field "
                    "(eval.py: --text-field)"
                )
            if text:
                text.encode()  # half of a surrogate pair, which JSON can spell, is no text
            yield text or ""
    except (UserError, GeneratorExit):
        raise
    # Errors of datasets, pyarrow, json and the network, each with kinds of its own.
    except Exception as error:
        raise UserError(
            f"cannot read {_what(shard)} at {_place(shard, number + 1)}: "
            f"{type(error).__name__}: {error}. Check {', '.join(shard.options)} "
            "(eval.py: --text or --hub, --subset, --split), and that the files are whole (or the "
            "network reachable)"
        ) from error
    if fields and not found and not shard.start:
        raise UserError(
            f"{_what(shard)}: {_place(shard, 1)} has no field {name!r}; its fields: "
            f"{', '.join(sorted(fields))}. Give one of them as data.text_field "
            "(eval.py: --text-field)"
        )


def _what(shard: Shard) -> str:
    return " ".join(filter(None, (shard.config.source, shard.config.path, shard.config.subset)))


def _place(shard: Shard, number: int) -> str:
    """Names row `number` (from 1) of a shard."""
    if shard.config.source == "hub":
        return f"row {number} of part {shard.start + 1} of {shard.stop}"
    file = shard.files[0]
    if shard.config.source == "parquet":
        return f"row {number} from row group {shard.start} of {file}"
    if not shard.stop:
        return f"row {number} of {file}"
    with open(file, "rb") as opened:
        _to_line(opened, shard.start)
        left = opened.tell()
        opened.seek(0)
        before = 0
        while left and (block := opened.read(min(left, 1 << 20))):
            left -= len(block)
            before += block.count(b"\n")
    return f"line {before + number} of {file}"


# --- rows: jsonl, parquet, hub -----------------------------------------------


def _jsonl_rows(shard: Shard) -> Iterator[dict]:
    """The rows of the lines that begin in a range of bytes; {} for an empty line."""
    with open(shard.files[0], "rb") as file:
        _to_line(file, shard.start)
        place = file.tell()
        while place < shard.stop and (line := file.readline()):
            place += len(line)
            row = json.loads(line) if line.strip() else {}
            if not isinstance(row, dict):
                raise ValueError(f"the line holds {type(row).__name__}, not an object")
            yield row


def _to_line(file, start: int) -> None:
    """Moves to the first line that begins at byte `start` or after it."""
    if start:
        file.seek(start - 1)
        file.readline()


def _parquet_rows(shard: Shard) -> Iterator[dict]:
    """Rows with the text field alone, or with all fields if there is no such field."""
    from pyarrow.parquet import ParquetFile

    name = shard.config.text_field
    with ParquetFile(shard.files[0]) as file:
        columns = [name] if name in file.schema_arrow.names else None
        groups = range(shard.start, shard.stop)
        for batch in file.iter_batches(PARQUET_ROWS, groups, columns):
            yield from batch.to_pylist()


def _dataset_rows(shard: Shard) -> Iterator[dict]:
    try:
        if shard.config.source == "hub":
            config = shard.config
            rows = open_dataset(config.path, config.subset, config.split, shard.revision)
            if shard.stop > 1:
                rows = rows.shard(num_shards=shard.stop, index=shard.start)
        else:
            rows = _open_json(shard.files[0])
        yield from rows
    except StopIteration:  # how `datasets` says that the files hold no row at all
        return


def _open_json(file: Path):
    from datasets import load_dataset

    # glob.escape: `datasets` would read a [ or * in a file's own name as a pattern
    return load_dataset(
        "json", data_files=[glob.escape(str(file.absolute()))], split="train", streaming=True
    )
