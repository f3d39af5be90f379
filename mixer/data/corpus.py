"""The documents of a corpus: the settings that name them, one iterator over them whatever the
source, and the split of each.

A document is one `str`. Sources are read as a stream, so memory use does not grow with the corpus.
Local text files are the exception: each is read whole, one at a time.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mixer.common.errors import UserError
from mixer.common.options import option, option_problems
from mixer.data.sources import FILE_SOURCES, Shard, local_files, shard_texts, shards, text_hash

SMALLEST_VOCABULARY = 257  # 256 bytes and <|endoftext|>
BUILTIN_SUBSETS = ("", "packages")
# For errors: the options that say where a text is.
CORPUS_OPTIONS = ("data.path", "data.subset", "data.split")
VALIDATION_OPTIONS = ("data.validation_path", "data.validation_split")


@dataclass
class DataConfig:
    """What to train on, and where the prepared files go."""

    source: str = option(
        "builtin",
        "where the text is from; builtin is the source of Python's standard library",
        choices=("builtin", "text", "jsonl", "parquet", "hub"),
    )
    path: str = option(
        "", "text, jsonl, parquet: a file, directory or glob; hub: the dataset's name"
    )
    subset: str = option(
        "",
        "hub: the dataset's configuration, such as sample-10BT; "
        "builtin: packages adds the source of the installed packages",
    )
    split: str = option(
        "train", "hub: the split to read; train and validation are both cut from it"
    )
    text_field: str = option("text", "jsonl, parquet, hub: the field that holds a document's text")
    tokenizer: str = option(
        "train", "train (a byte-level BPE on the source), a local directory, or a hub name"
    )
    vocab_size: int = option(
        8000,
        "size of the BPE that is trained; unused with an existing tokenizer",
        at_least=SMALLEST_VOCABULARY,
    )
    directory: str = option("data/builtin", "where the prepared token files go")
    packed: bool = option(
        True, "true: documents joined by EOS, cut at the context; false: one document a row, padded"
    )
    validation_fraction: float = option(
        0.01, "share of the documents held out for validation", above=0, below=1
    )
    validation_path: str = option(
        "",
        "text, jsonl, parquet: validate on this file, directory or glob; "
        "all documents of data.path are then for training",
    )
    validation_split: str = option(
        "",
        "hub: validate on this split of the dataset; "
        "all documents of data.split are then for training",
    )
    max_documents: int = option(
        0,
        "read only this many documents; 0: all. A validation text of its own is read whole",
        at_least=0,
    )
    workers: int = option(
        0, "processes that tokenise; 0: one for each core this process may use", at_least=0
    )


def check(config: DataConfig) -> None:
    """Raise UserError for a setting that cannot work, before anything is read or written."""
    problems = option_problems(config, "data.")
    if problems:
        raise UserError("; ".join(problems))
    if config.source != "builtin" and not config.path:
        wanted = "a dataset's name" if config.source == "hub" else "a file, directory or glob"
        raise UserError(f"data.path is empty; source {config.source!r} needs {wanted} there")
    if config.source == "builtin" and config.subset not in BUILTIN_SUBSETS:
        raise UserError(
            f"data.subset is {config.subset!r}; source builtin allows packages (the source of the "
            "installed packages too), or nothing for the standard library alone: set "
            "data.subset=packages or data.subset="
        )
    if not config.directory:
        raise UserError("data.directory is empty; set it to where the prepared files should go")
    _check_validation(config)


def _check_validation(config: DataConfig) -> None:
    """Raise UserError for settings of the validation text that do not go together."""
    if config.validation_path and config.source not in FILE_SOURCES:
        instead = "; set data.validation_split instead" if config.source == "hub" else ""
        raise UserError(
            f"data.validation_path is {config.validation_path!r}, which source {config.source!r} "
            f"cannot read; allowed with text, jsonl and parquet{instead}"
        )
    if config.validation_split and config.source != "hub":
        raise UserError(
            f"data.validation_split is {config.validation_split!r}, and source {config.source!r} "
            "has no splits; allowed with hub (for files, set data.validation_path)"
        )
    if config.validation_split and config.validation_split == config.split:
        raise UserError(
            f"data.split and data.validation_split are both {config.split!r}: the model would be "
            "validated on what it is trained on; name two splits"
        )
    name = "validation_path" if config.validation_path else "validation_split"
    default = DataConfig.validation_fraction
    if getattr(config, name) and config.validation_fraction != default:
        raise UserError(
            f"data.{name} is {getattr(config, name)!r} and data.validation_fraction is "
            f"{config.validation_fraction}: the validation text is either its own or a share of "
            f"the documents. Leave out data.validation_fraction (its default is {default}), or "
            f"data.{name}"
        )


def validation_source(config: DataConfig) -> DataConfig | None:
    """Where the validation documents are, where they have a source of their own, else None."""
    of_its_own = {"max_documents": 0, "validation_path": "", "validation_split": ""}
    if config.validation_path:
        return dataclasses.replace(config, path=config.validation_path, **of_its_own)
    if config.validation_split:
        return dataclasses.replace(config, split=config.validation_split, **of_its_own)
    return None


def split_shards(config: DataConfig) -> list[tuple[str, Shard]]:
    """(split, shard) of all shards of the corpus, in the order of the documents. The split is ""
    where each document has its own (`split_of`).

    Raises UserError for a source that cannot be read, as early as that can be known.
    """
    check(config)
    held_out = validation_source(config)
    if held_out is None:
        return [("", shard) for shard in shards(config, CORPUS_OPTIONS)]
    # Errors in the validation text are found now, not after hours with the training text.
    next(documents(held_out, VALIDATION_OPTIONS))
    _refuse_common_files(config, held_out)
    training = [("train", shard) for shard in shards(config, CORPUS_OPTIONS)]
    return training + [("validation", shard) for shard in shards(held_out, VALIDATION_OPTIONS)]


def training_documents(plan: list[tuple[str, Shard]], config: DataConfig) -> Iterator[str]:
    """The documents of the training split of a plan (`split_shards`), in order."""
    index = 0
    for split, shard in plan:
        if split == "validation":
            return
        for text in shard_documents(shard):
            if config.max_documents and index == config.max_documents:
                return
            if (split or split_of(index, text, config.validation_fraction)) == "train":
                yield text
            index += 1


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


def documents(config: DataConfig, options: tuple[str, ...] = CORPUS_OPTIONS) -> Iterator[str]:
    """Every document of the source, in an order that does not change; documents of nothing but
    white space are left out.

    `options` names, for errors, the options that say where to read. Raises UserError for a missing
    file or dataset, text that is not UTF-8, a missing text field, or a source without documents.
    """
    check(config)
    texts = (text for shard in shards(config, options) for text in shard_documents(shard))
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


def split_of(index: int, text: str, validation_fraction: float) -> str:
    """The split of document `index`, where a share of the documents is held out: "train" or
    "validation".

    It follows a hash of the text, so a document keeps its side when the corpus grows or is
    reordered, and exact copies of it land on the same side. The first two documents are fixed, so
    that neither split is empty once there are two documents.
    """
    if index < 2:
        return "validation" if index else "train"
    return "validation" if text_hash(text) < validation_fraction * 2**64 else "train"


def known_bytes(config: DataConfig, of: Iterable[Shard]) -> int | None:
    """Bytes of all documents where that is cheap to know, else None; for the progress bar only."""
    if config.max_documents or config.source not in ("builtin", "text"):
        return None
    return sum(shard.bytes for shard in of)
