"""The settings of the data: what to train on, and where the prepared files go."""

import dataclasses
from dataclasses import dataclass

from mixer.common.errors import UserError
from mixer.common.options import option, option_problems

FILE_SOURCES = ("text", "jsonl", "parquet")
TASKS = ("copy", "recall", "needle")  # see mixer/data/tasks.py
SMALLEST_VOCABULARY = 257  # 256 bytes and <|endoftext|>
# Options that name text, and the sources that read them. Others refuse them.
READ_BY = {
    "path": (*FILE_SOURCES, "hub"),
    "validation_path": FILE_SOURCES,
    "validation_split": ("hub",),
}
# Options that these sources alone use. A configuration may set them all the same: other sources are
# chosen on the command line, over its own.
OF_SOURCES = {
    "pairs": ("recall",),
    "subset": ("builtin", "hub"),
    "split": ("hub",),
    "text_field": ("jsonl", "parquet", "hub"),
    "pair_field": ("jsonl", "parquet", "hub"),
}


@dataclass
class DataConfig:
    """What to train on, and where the prepared files go."""

    source: str = option(
        "builtin",
        "where the text is from; builtin: Python's standard library; copy, recall, needle: tasks "
        "of random tokens (docs/tasks.md)",
        choices=("builtin", *FILE_SOURCES, "hub", *TASKS),
    )
    path: str = option(
        "", "text, jsonl, parquet: a file, directory or glob; hub: the dataset's name"
    )
    subset: str = option(
        "",
        "hub: the dataset's configuration, such as sample-10BT; builtin: packages adds the "
        "installed packages",
    )
    split: str = option(
        "train", "hub: the split to read; train and validation are both cut from it"
    )
    text_field: str = option("text", "jsonl, parquet, hub: the field that holds a document's text")
    pair_field: str = option(
        "", "jsonl, parquet, hub: the field of the text that belongs to the one in text_field"
    )
    tokenizer: str = option(
        "train", "train (a byte-level BPE on the source), a local directory, or a hub name"
    )
    vocab_size: int = option(
        8000,
        "size of the BPE that is trained, or number of a task's tokens",
        at_least=SMALLEST_VOCABULARY,
        at_most=2**20,
    )
    pairs: int = option(
        0, "recall: key-value pairs of a sample; 0: as many as fit into the context", at_least=0
    )
    directory: str = option("data/builtin", "where the prepared token files go")
    packed: bool = option(
        True, "true: documents joined by EOS, cut at the context; false: one document a row, padded"
    )
    cut: bool = option(
        False,
        "packed=false: of each document only the beginning, as long as the context, and without "
        "its EOS; else a longer document is cut into several rows",
    )
    validation_fraction: float = option(
        0.01, "share of the documents held out for validation", above=0, below=1
    )
    validation_documents: int = option(
        0, "hold out the first so many documents in place of a share; 0: that share", at_least=0
    )
    validation_path: str = option(
        "",
        "text, jsonl, parquet: validate on this file, directory or glob, and train on all of path",
    )
    validation_split: str = option(
        "", "hub: validate on this split of the dataset, and train on all of split"
    )
    max_documents: int = option(
        0,
        "read only so many documents; 0: all. A validation text of its own is read whole",
        at_least=0,
    )
    workers: int = option(
        0,
        "processes that tokenise; 0: one for each core this process may use",
        at_least=0,
        at_most=1024,
    )


def unused_options(config: DataConfig) -> set[str]:
    """Options that the chosen source, tokenizer or validation text leaves without a use."""
    if config.source in TASKS:
        used = {"source", "vocab_size", *(["pairs"] if config.source == "recall" else [])}
        return {item.name for item in dataclasses.fields(config)} - used
    unused = {name for name, sources in OF_SOURCES.items() if config.source not in sources}
    if config.tokenizer != "train":
        unused.add("vocab_size")
    if config.packed:
        unused.add("cut")
    has_own = config.validation_path or config.validation_split
    if has_own:
        unused.add("validation_documents")
    if has_own or config.validation_documents:
        unused.add("validation_fraction")
    return unused


def without_unused(config: DataConfig) -> DataConfig:
    """The same with the defaults of `unused_options`: nothing may look as if it had been read."""
    defaults = {name: getattr(DataConfig, name) for name in unused_options(config)}
    return dataclasses.replace(config, **defaults)


def check(config: DataConfig) -> None:
    """Raise UserError for settings that cannot work, before anything is read or written."""
    source, problems = config.source, option_problems(config, "data.")
    if source not in TASKS and not problems:
        problems += [
            f"data.{name} is {getattr(config, name)!r}, which source {source!r} does not read; "
            f"allowed with data.source {', '.join(readers)}: set one of these, or data.{name}="
            for name, readers in READ_BY.items()
            if getattr(config, name) and source not in readers
        ]
        if source in READ_BY["path"] and not config.path:
            problems.append(f"data.path is empty; source {source!r} needs a name or path there")
        if source == "builtin" and config.subset not in ("", "packages"):
            problems.append(f"data.subset is {config.subset!r}; source builtin allows packages")
        if config.validation_split and config.validation_split == config.split:
            problems.append(
                f"data.split and data.validation_split are both {config.split!r}: the model would "
                "be validated on what it is trained on; name two splits"
            )
    if problems:
        raise UserError("; ".join(problems))
