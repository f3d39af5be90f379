"""The documents of a corpus: one iterator over them whatever the source, and the split of each.

A document is one `str`. Sources are read as a stream, so memory use does not grow with the corpus.
Local text files are the exception: each is read whole, one at a time.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from mixer.common.errors import UserError
from mixer.common.say import Say, say_on_stderr
from mixer.data.config import DataConfig, check, validation_source
from mixer.data.readers import shard_texts
from mixer.data.sources import Shard, source_shards, text_hash

SplitShards = list[tuple[str, Shard]]  # see split_shards
FixedSplits = dict[int, str]  # the split by the hash of a text, see fixed_splits
MOST_MISSING = 0.1  # share of rows without the text field; with more, that is no field of all rows


def split_shards(config: DataConfig, say: Say = say_on_stderr) -> SplitShards:
    """(split, shard) of all shards of the corpus, in the order of the documents. The split is ""
    where each document has its own (`split_of`).

    Raises UserError for a source that cannot be read, as early as that can be known.
    """
    check(config)
    held_out = validation_source(config)
    if held_out is None:
        return [("", shard) for shard in source_shards(config, say)]
    validation = source_shards(held_out, say)
    # Errors in the validation text are found now, not after hours with the training text.
    next(documents(validation, held_out))
    training = source_shards(config, say)
    _refuse_common_files(training, validation)
    splits = {"train": training, "validation": validation}
    return [(split, shard) for split, shards in splits.items() for shard in shards]


def training_documents(
    shards: SplitShards, config: DataConfig, fixed: FixedSplits
) -> Iterator[str]:
    """The documents of the training split, in order."""
    for split, text in _with_split(shards, config):
        if (split or split_of(text, config.validation_fraction, fixed)) == "train":
            yield text


def fixed_splits(shards: SplitShards, config: DataConfig) -> FixedSplits:
    """Two documents that `split_of` does not split by hash, so that neither split is empty: the
    first is for training, the next that is no copy of it for validation. Where the validation text
    is one of its own there are none.

    Raises UserError for a corpus without a document for each split.
    """
    texts = _with_split(shards, config)
    split, first = next(texts, (None, None))
    if first is None:
        raise no_documents(config)
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


def _with_split(shards: SplitShards, config: DataConfig) -> Iterator[tuple[str, str]]:
    """(split of its shard, document) of all documents but those of a validation text of its own."""
    texts = (
        (split, text)
        for split, shard in shards
        if split != "validation"
        for text in shard_documents(shard)
    )
    return itertools.islice(texts, config.max_documents or None)


def shard_documents(shard: Shard, counts: Any = None, blank: bool = False) -> Iterator[str]:
    """The documents of a shard: its texts but those of nothing but white space; with `blank`, these
    too. What is left out is counted: `counts.missing` texts, and `counts.blank` ones.
    """
    counts = counts or SimpleNamespace(missing=0, blank=0)
    for text in shard_texts(shard):
        if text is None:
            counts.missing += 1
        elif not text or (text.isspace() and not blank):
            counts.blank += 1
        else:
            yield text


def _refuse_common_files(training: list[Shard], validation: list[Shard]) -> None:
    def files(shards: list[Shard]) -> dict:  # by what all links to a file have in common
        found = {file: os.stat(file) for shard in shards for file in shard.files}
        return {(stat.st_dev, stat.st_ino): file for file, stat in found.items()}

    common = files(training).keys() & files(validation)
    if common:
        raise UserError(
            f"{min(map(str, map(files(training).get, common)))} belongs to both data.path and "
            "data.validation_path: the model would be validated on what it is trained on; move the "
            "validation text out of data.path, or name the training files alone"
        )


def documents(
    shards: Iterable[Shard], config: DataConfig, blank: bool = False, say: Say = say_on_stderr
) -> Iterator[str]:
    """The documents of the shards, the first `max_documents` of them; see `shard_documents`. Says
    how many rows gave none.

    Raises UserError for text that is not UTF-8, too many rows without the text field, and where
    there is no document.
    """
    counts = SimpleNamespace(documents=0, missing=0, blank=0)
    texts = (text for shard in shards for text in shard_documents(shard, counts, blank))
    for text in itertools.islice(texts, config.max_documents or None):
        counts.documents += 1
        yield text
    if not counts.documents:
        raise no_documents(config)
    say_left_out(counts, config, say)


def say_left_out(counts: Any, config: DataConfig, say: Say) -> None:
    """Says what gave no document. Raises UserError where too many rows have no text field."""
    of_all = counts.documents + counts.missing + counts.blank
    field = f"have no text in field {config.text_field!r}"
    missing = f"{counts.missing:,} {'are not UTF-8' if config.source == 'builtin' else field}"
    if counts.missing > MOST_MISSING * of_all:
        raise UserError(
            f"of {of_all:,} entries of {_where(config)}, {missing}; at most {MOST_MISSING:.0%} may "
            "be left out. Give a field of all rows as data.text_field (eval.py: --text-field), or "
            "remove the other rows"
        )
    if counts.missing or counts.blank:
        blank = f"{counts.blank:,} are empty or white space alone"
        say(f"left out: of {of_all:,} entries of {_where(config)}, {missing}, {blank}")


def no_documents(config: DataConfig) -> UserError:
    """The error for a source without a document."""
    return UserError(f"the corpus is empty: no document with text in {_where(config)}")


def _where(config: DataConfig) -> str:
    return config.path or "the standard library"


def split_of(text: str, validation_fraction: float, fixed: FixedSplits) -> str:
    """The split of a document, where a share of the documents is held out: "train" or "validation".

    It follows a hash of the text, so a document keeps its split when the corpus grows or is
    reordered, and exact copies of it land in the same split.
    """
    hashed = text_hash(text)
    by_hash = "validation" if hashed < validation_fraction * 2**64 else "train"
    return fixed.get(hashed, by_hash)
