"""The documents of a corpus: one iterator over them whatever the source, the split of each, and
batches of them for the workers.

A document is one `str`. Sources are read as a stream, so memory use does not grow with the corpus.
"""

import itertools
import operator
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mixer.common.errors import UserError
from mixer.common.say import Say, say_on_stderr
from mixer.data.config import DataConfig, check, validation_source
from mixer.data.readers import part_texts
from mixer.data.sources import BETWEEN, Part, source_parts, text_hash

Corpus = list[tuple[str, Part]]  # see corpus_parts
FixedSplits = dict[int, str]  # the split by the hash of a text, see fixed_splits
MOST_MISSING = 0.1  # share of rows without the text field; with more, that is no field of all rows
BATCH_CHARACTERS = 1 << 20  # a batch has at least this many, but for the last one of a source


def corpus_parts(config: DataConfig, say: Say = say_on_stderr) -> Corpus:
    """(split, part) of all parts of the corpus, in the order of the documents. The split is ""
    where each document has its own (`split_of`).

    Raises UserError for a source that cannot be read, as early as that can be known.
    """
    check(config)
    held_out = validation_source(config)
    if held_out is None:
        return [("", part) for part in source_parts(config, say)]
    validation = source_parts(held_out, say, "data.validation_path")
    # Errors in the validation text are found now, not after hours with the training text.
    next(documents(validation, held_out))
    training = source_parts(config, say)
    _refuse_common_files(training, validation)
    splits = {"train": training, "validation": validation}
    return [(split, part) for split, parts in splits.items() for part in parts]


def _refuse_common_files(training: list[Part], validation: list[Part]) -> None:
    def files(parts: list[Part]) -> dict:  # by what all links to a file have in common
        found = {part.file: os.stat(part.file) for part in parts if part.file}
        return {(status.st_dev, status.st_ino): file for file, status in found.items()}

    common = files(training).keys() & files(validation)
    if common:
        raise UserError(
            f"{min(map(str, map(files(training).get, common)))} belongs to both data.path and "
            "data.validation_path: the model would be validated on what it is trained on; move the "
            "validation text out of data.path, or name the training files alone"
        )


# --- documents, and what is left out -----------------------------------------


def is_document(text: str | None) -> bool:
    """Whether a text of a source is a document: not where it is missing, empty or blank."""
    return bool(text) and not text.isspace()


def texts_of(document: str, is_pair: bool) -> list[str]:
    """The texts that a document is made of: itself, or query and target."""
    return document.split(BETWEEN, 1) if is_pair else [document]


def documents(
    parts: Iterable[Part], config: DataConfig, blank: bool = False, say: Say = say_on_stderr
) -> Iterator[str]:
    """The documents of the parts, the first `max_documents` of them; with `blank`, texts of white
    space count as documents. Says how many rows have no text.

    Raises UserError for text that is not UTF-8, too many rows without the text field, and where
    there is no document.
    """
    found, missing = 0, 0
    for text in itertools.chain.from_iterable(map(part_texts, parts)):
        missing += text is None
        if is_document(text) or (text and blank):
            found += 1
            yield text
            if found == config.max_documents:
                break
    if not found:
        raise _no_documents(config)
    say_left_out(found, missing, config, say)


def say_left_out(found: int, missing: int, config: DataConfig, say: Say) -> None:
    """Says how many rows have no text beside the documents found. Raises UserError for too many."""
    names = " or ".join(map(repr, filter(None, (config.text_field, config.pair_field))))
    field = f"have no text in field {names}"
    problem = "are not UTF-8" if config.source == "builtin" else field
    if missing > MOST_MISSING * (found + missing):
        raise UserError(
            f"{missing:,} of {found + missing:,} entries of {_where(config)} {problem}; at most "
            f"{MOST_MISSING:.0%} may be left out. Give a field of all rows as data.text_field "
            "(eval.py: --text-field), or remove the other rows"
        )
    if missing:
        say(f"left out: {missing:,} of {found + missing:,} entries of {_where(config)} {problem}")


def _no_documents(config: DataConfig) -> UserError:
    return UserError(f"the corpus is empty: no document with text in {_where(config)}")


def _where(config: DataConfig) -> str:
    return config.path or "the standard library"


# --- splits ------------------------------------------------------------------


def split_of(text: str, validation_fraction: float, fixed: FixedSplits) -> str:
    """The split of a document, where a share of the documents is held out: "train" or "validation".

    It follows a hash of the text, so a document keeps its split when the corpus grows or is
    reordered, and exact copies of it land in the same split.
    """
    hashed = text_hash(text)
    by_hash = "validation" if hashed < validation_fraction * 2**64 else "train"
    return fixed.get(hashed, by_hash)


def fixed_splits(corpus: Corpus, config: DataConfig) -> FixedSplits:
    """Two documents that `split_of` does not split by hash, so that neither split is empty: the
    first is for training, the next that is no copy of it for validation. A corpus with a validation
    text of its own has none, and neither has one whose first documents are held out.

    Raises UserError for a corpus without a document for each split.
    """
    texts = _to_be_split(corpus, config)
    split, first = next(texts, (None, None))
    if first is None:
        raise _no_documents(config)
    if split:
        if next(training_documents(corpus, config, {}), None) is None:
            raise UserError(
                f"data.validation_documents = {config.validation_documents} leaves no document of "
                f"{_where(config)} for training; give fewer"
            )
        return {}
    other = next((text for _, text in texts if text != first), None)
    if other is None:
        raise UserError(
            f"the corpus ({config.source} {config.path}) is a single document (copies do not "
            "count), so none is left for validation: each split holds whole documents. Give at "
            "least two documents (a text file is one), or a validation text of its own "
            "(data.validation_path, for the hub data.validation_split)"
        )
    return {text_hash(first): "train", text_hash(other): "validation"}


def training_documents(corpus: Corpus, config: DataConfig, fixed: FixedSplits) -> Iterator[str]:
    """The documents of the training split, in order."""
    for split, text in _to_be_split(corpus, config):
        if (split or split_of(text, config.validation_fraction, fixed)) == "train":
            yield from texts_of(text, bool(config.pair_field))


def _to_be_split(corpus: Corpus, config: DataConfig) -> Iterator[tuple[str, str]]:
    """(split of its part, document) of all documents but those of a validation text of its own."""
    corpus = [(split, part) for split, part in corpus if split != "validation"]
    for row in rows(corpus, config, Place()):
        if is_document(row.text):
            yield row.split, row.text


# --- rows, and batches of them for the workers -------------------------------


class Place(NamedTuple):
    """How far a corpus was read: `rows` rows of its part number `part`."""

    part: int = 0
    rows: int = 0


class Row(NamedTuple):
    split: str  # of its part or place; "" if each document has its own (`split_of`)
    text: str | None
    end: Place  # after it


@dataclass(frozen=True)
class Batch:
    """The texts of consecutive rows, those that are no documents included."""

    split: str
    texts: list[str | None]
    end: Place


def rows(corpus: Corpus, config: DataConfig, start: Place, documents: int = 0) -> Iterator[Row]:
    """The corpus from `start` on, before which there are `documents`. It ends at `max_documents`
    (0: all), which a validation text of its own does not count for.
    """
    skip, held_out = start.rows, config.validation_documents
    for number in range(start.part, len(corpus)):
        split, part = corpus[number]
        most = config.max_documents if split != "validation" else 0
        if most and documents >= most:
            continue
        for row, text in enumerate(itertools.islice(part_texts(part), skip, None), skip + 1):
            by_place = held_out and ("validation" if documents < held_out else "train")
            yield Row(split or by_place or "", text, Place(number, row))
            documents += is_document(text)
            if most and documents == most:
                break
        skip = 0


def batches(read: Iterable[Row]) -> Iterator[Batch]:
    """Rows of one split each, in their order."""
    for split, of_split in itertools.groupby(read, key=operator.attrgetter("split")):
        texts, size = [], 0
        for row in of_split:
            texts.append(row.text)
            size += 1 + len(row.text or "")
            if size >= BATCH_CHARACTERS:
                yield Batch(split, texts, row.end)
                texts, size = [], 0
        if texts:
            yield Batch(split, texts, row.end)
