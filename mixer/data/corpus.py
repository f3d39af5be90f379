"""The documents of a corpus: one iterator over them whatever the source, the split of each, and
batches of them for the workers.

A document is one `str`. Sources are read as a stream, so memory use does not grow with the corpus.
"""

import itertools
import operator
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

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
    space count as documents. Says how many rows gave none.

    Raises UserError for text that is not UTF-8, too many rows without the text field, and where
    there is no document.
    """
    counts = SimpleNamespace(documents=0, missing=0, blank=0)
    for text in itertools.chain.from_iterable(map(part_texts, parts)):
        if is_document(text) or (text and blank):
            counts.documents += 1
            yield text
            if counts.documents == config.max_documents:
                break
        else:
            counts.missing += text is None
            counts.blank += text is not None
    if not counts.documents:
        raise _no_documents(config)
    say_left_out(counts, config, say)


def say_left_out(counts: Any, config: DataConfig, say: Say) -> None:
    """Says what gave no document. Raises UserError where too many rows have no text field."""
    of_all = counts.documents + counts.missing + counts.blank
    names = " or ".join(map(repr, filter(None, (config.text_field, config.pair_field))))
    field = f"have no text in field {names}"
    missing = f"{counts.missing:,} {'are not UTF-8' if config.source == 'builtin' else field}"
    if counts.missing > MOST_MISSING * of_all:
        raise UserError(
            f"of {of_all:,} entries of {_where(config)}, {missing}; at most {MOST_MISSING:.0%} may "
            "be left out. Give a field of all rows as data.text_field (eval.py: --text-field), or "
            "remove the other rows"
        )
    if counts.missing or counts.blank:
        blank = f"{counts.blank:,} are empty or blank"
        say(f"left out: of {of_all:,} entries of {_where(config)}, {missing}, {blank}")


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
    text of its own has none.

    Raises UserError for a corpus without a document for each split.
    """
    texts = _with_split(corpus, config)
    split, first = next(texts, (None, None))
    if first is None:
        raise _no_documents(config)
    if split:
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
    for split, text in _with_split(corpus, config):
        if (split or split_of(text, config.validation_fraction, fixed)) == "train":
            yield from texts_of(text, bool(config.pair_field))


def _with_split(corpus: Corpus, config: DataConfig) -> Iterator[tuple[str, str]]:
    """(split of its part, document) of all documents but those of a validation text of its own."""
    texts = (
        (split, text)
        for split, part in corpus
        if split != "validation"
        for text in part_texts(part)
        if is_document(text)
    )
    return itertools.islice(texts, config.max_documents or None)


# --- batches for the workers -------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Consecutive texts of a source, those that are no documents included. After it, `rows` rows of
    part number `part` of the corpus have been read.
    """

    split: str  # of its documents; "" if each has its own (`split_of`)
    texts: list[str | None]
    part: int
    rows: int


def batches(
    corpus: Corpus, max_documents: int, part: int, rows: int, documents: int
) -> Iterator[Batch]:
    """The corpus from row `rows` of part number `part` on, before which there are `documents`. It
    ends at `max_documents` (0: all), which a validation text of its own does not count for.
    """
    read = _numbered_rows(corpus, max_documents, part, rows, documents)
    for split, of_split in itertools.groupby(read, key=operator.itemgetter(0)):
        texts, size = [], 0
        for _, number, row, text in of_split:
            texts.append(text)
            size += 1 + len(text or "")
            if size >= BATCH_CHARACTERS:
                yield Batch(split, texts, number, row)
                texts, size = [], 0
        if texts:
            yield Batch(split, texts, number, row)


def _numbered_rows(
    corpus: Corpus, max_documents: int, first: int, skip: int, documents: int
) -> Iterator[tuple[str, int, int, str | None]]:
    """(split, number of the part, number of the row from 1, text), see `batches`."""
    for number in range(first, len(corpus)):
        split, part = corpus[number]
        most = max_documents if split != "validation" else 0
        if most and documents >= most:
            continue
        texts = itertools.islice(part_texts(part), skip, None)
        for row, text in enumerate(texts, skip + 1):
            yield split, number, row, text
            documents += is_document(text)
            if most and documents == most:
                break
        skip = 0
