"""The documents of a corpus: one iterator over them whatever the source, and the split of each.

A document is one `str`. Sources are read as a stream, so memory use does not grow with the corpus.
Local text files are the exception: each is read whole, one at a time.
"""

import itertools
from collections.abc import Iterator

from mixer.common.errors import UserError
from mixer.data.config import (
    CORPUS_OPTIONS,
    FILE_SOURCES,
    VALIDATION_OPTIONS,
    DataConfig,
    check,
    validation_source,
)
from mixer.data.readers import shard_texts
from mixer.data.sources import Shard, local_files, source_shards, text_hash

SplitShards = list[tuple[str, Shard]]  # see split_shards
FixedSplits = dict[int, str]  # the split by the hash of a text, see fixed_splits


def split_shards(config: DataConfig) -> SplitShards:
    """(split, shard) of all shards of the corpus, in the order of the documents. The split is ""
    where each document has its own (`split_of`).

    Raises UserError for a source that cannot be read, as early as that can be known.
    """
    check(config)
    held_out = validation_source(config)
    if held_out is None:
        return [("", shard) for shard in source_shards(config, CORPUS_OPTIONS)]
    # Errors in the validation text are found now, not after hours with the training text.
    next(documents(held_out, VALIDATION_OPTIONS))
    _refuse_common_files(config, held_out)
    training = [("train", shard) for shard in source_shards(config, CORPUS_OPTIONS)]
    validation = [("validation", shard) for shard in source_shards(held_out, VALIDATION_OPTIONS)]
    return training + validation


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


def shard_documents(shard: Shard) -> Iterator[str]:
    """The documents of a shard: its texts but those of nothing but white space."""
    return (text for text in shard_texts(shard) if text and not text.isspace())


def _refuse_common_files(config: DataConfig, held_out: DataConfig) -> None:
    if config.source not in FILE_SOURCES:
        return
    held_out_files = {file.resolve() for file in local_files(held_out, VALIDATION_OPTIONS)}
    common = [
        file for file in local_files(config, CORPUS_OPTIONS) if file.resolve() in held_out_files
    ]
    if common:
        raise UserError(
            f"{common[0]} belongs to both data.path and data.validation_path: the model would be "
            "validated on what it is trained on; move the validation text out of data.path, or "
            "name the training files alone"
        )


def documents(
    config: DataConfig, options: tuple[str, ...] = CORPUS_OPTIONS, blank: bool = False
) -> Iterator[str]:
    """Every document of the source, in an order that does not change; without `blank`, documents of
    nothing but white space are left out, and empty ones always.

    `options` names, for errors, the options that say where to read. Raises UserError for a missing
    file or dataset, text that is not UTF-8, a missing text field, or a source without documents.
    """
    check(config)
    read = shard_texts if blank else shard_documents
    texts = (text for shard in source_shards(config, options) for text in read(shard) if text)
    found = 0
    for text in itertools.islice(texts, config.max_documents or None):
        found += 1
        yield text
    if not found:
        raise no_documents(config)


def no_documents(config: DataConfig) -> UserError:
    """The error for a source without a document."""
    where = "the standard library" if config.source == "builtin" else config.path
    return UserError(
        f"the corpus is empty: no document with text in {where} (source {config.source!r})"
    )


def split_of(text: str, validation_fraction: float, fixed: FixedSplits) -> str:
    """The split of a document, where a share of the documents is held out: "train" or "validation".

    It follows a hash of the text, so a document keeps its split when the corpus grows or is
    reordered, and exact copies of it land in the same split.
    """
    hashed = text_hash(text)
    by_hash = "validation" if hashed < validation_fraction * 2**64 else "train"
    return fixed.get(hashed, by_hash)
