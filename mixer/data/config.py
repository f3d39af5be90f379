"""The settings of the data: what to train on, and where the prepared files go."""

import dataclasses
from dataclasses import dataclass

from mixer.common.errors import UserError
from mixer.common.options import option, option_problems

FILE_SOURCES = ("text", "jsonl", "parquet")
SMALLEST_VOCABULARY = 257  # 256 bytes and <|endoftext|>
BUILTIN_SUBSETS = ("", "packages")
# Options that these sources alone use. A configuration may set them all the same: other sources are
# chosen on the command line, over its own.
OF_SOURCES = {
    "subset": ("builtin", "hub"),
    "split": ("hub",),
    "text_field": ("jsonl", "parquet", "hub"),
}


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
        at_most=2**20,
    )
    directory: str = option("data/builtin", "where the prepared token files go")
    packed: bool = option(
        True, "true: documents joined by EOS, cut at the context; false: one document a row, padded"
    )
    validation_fraction: float = option(
        0.01,
        "share of the documents held out for validation; unused with a validation text of its own",
        above=0,
        below=1,
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
        0,
        "processes that tokenise; 0: one for each core this process may use",
        at_least=0,
        at_most=1024,
    )


def unused_options(config: DataConfig) -> set[str]:
    """Options that the chosen source, tokenizer or validation text leaves without a use."""
    unused = {name for name, sources in OF_SOURCES.items() if config.source not in sources}
    if config.tokenizer != "train":
        unused.add("vocab_size")
    if validation_source(config):
        unused.add("validation_fraction")
    return unused


def without_unused(config: DataConfig) -> DataConfig:
    """The same with the defaults of `unused_options`: nothing may look as if it had been read."""
    defaults = {name: getattr(DataConfig, name) for name in unused_options(config)}
    return dataclasses.replace(config, **defaults)


def check(config: DataConfig) -> None:
    """Raise UserError for settings that cannot work, alone or together, before anything is read or
    written.
    """
    problems = option_problems(config, "data.")
    source, path, subset = config.source, config.path, config.subset
    own_path, own_split = config.validation_path, config.validation_split
    wanted = "a dataset's name" if source == "hub" else "a file, directory or glob"
    instead = "; set data.validation_split instead" if source == "hub" else ""
    clashes = [
        (
            source != "builtin" and not path,
            f"data.path is empty; source {source!r} needs {wanted} there",
        ),
        (
            source == "builtin" and path,
            f"data.path is {path!r}, which source 'builtin' does not read: set data.source to what "
            "is there (text, jsonl, parquet, hub), or data.path= for the standard library",
        ),
        (
            source == "builtin" and subset not in BUILTIN_SUBSETS,
            f"data.subset is {subset!r}; source builtin allows packages (the source of the "
            "installed packages too), or nothing for the standard library alone: set "
            "data.subset=packages or data.subset=",
        ),
        (
            not config.directory,
            "data.directory is empty; set it to where the prepared files should go",
        ),
        (
            own_path and source not in FILE_SOURCES,
            f"data.validation_path is {own_path!r}, which source {source!r} cannot read; allowed "
            f"with text, jsonl and parquet{instead}",
        ),
        (
            own_split and source != "hub",
            f"data.validation_split is {own_split!r}, and source {source!r} has no splits; allowed "
            "with hub (for files, set data.validation_path)",
        ),
        (
            own_split and own_split == config.split,
            f"data.split and data.validation_split are both {own_split!r}: the model would be "
            "validated on what it is trained on; name two splits",
        ),
    ]
    problems += [text for holds, text in clashes if holds]
    if problems:
        raise UserError("; ".join(problems))


def validation_source(config: DataConfig) -> DataConfig | None:
    """Where the validation documents are, where they have a source of their own, else None."""
    of_its_own = {"max_documents": 0, "validation_path": "", "validation_split": ""}
    if config.validation_path:
        return dataclasses.replace(config, path=config.validation_path, **of_its_own)
    if config.validation_split:
        return dataclasses.replace(config, split=config.validation_split, **of_its_own)
    return None
