"""The settings of the data, and the manifest, in which prepared data records them and itself."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mixer.common.errors import UserError
from mixer.common.files import STAGE, as_path, check_writable, has_sha256, read_json
from mixer.common.options import has_type, option

SPLITS = ("train", "validation")
FILE_SOURCES = ("text", "jsonl", "parquet")
TEXTS = ("builtin", *FILE_SOURCES, "hub")
TASKS = ("copy", "recall", "needle")  # samples of random tokens
# Options that name text, and the sources that read them. Others refuse them.
READ_BY = {
    "path": (*FILE_SOURCES, "hub"),
    "validation_path": FILE_SOURCES,
    "validation_split": ("hub",),
}
# Options that these sources alone use. A configuration may set them all the same: other sources are
# chosen on the command line, over its own.
OF_TEXTS = (
    "path",
    "tokenizer",
    "directory",
    "packed",
    "cut",
    "validation_fraction",
    "validation_documents",
    "validation_path",
    "validation_split",
    "max_documents",
    "workers",
)
OF_SOURCES = dict.fromkeys(OF_TEXTS, TEXTS) | {
    "pairs": ("recall", "needle"),
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
        "source of the text; builtin: Python's standard library; copy, recall, needle: tasks "
        "of random tokens (docs/tasks.md)",
        choices=(*TEXTS, *TASKS),
    )
    path: str = option("", "text, jsonl, parquet: file, folder or glob; hub: the dataset's name")
    subset: str = option(
        "", "hub: the dataset's configuration; builtin: 'packages' adds installed packages"
    )
    split: str = option("train", "hub: the split to read, also for validation")
    text_field: str = option("text", "jsonl, parquet, hub: the field with the text")
    pair_field: str = option("", "jsonl, parquet, hub: the field with the text's partner")
    tokenizer: str = option("train", "a directory or hub name; train: a new byte-level BPE")
    # At least 256 bytes and <|endoftext|>.
    vocab_size: int = option(8000, "vocabulary of a new BPE or a task", at_least=257, at_most=2**20)
    pairs: int = option(
        0, "recall, needle (in training): pairs per sample; 0: all that fit", at_least=0
    )
    directory: str = option("data/builtin", "where the tokenized text goes")
    packed: bool = option(
        True, "join documents by EOS, cut at the context; false: each starts a new, padded row"
    )
    cut: bool = option(False, "packed=false: keep only a document's first row, without EOS")
    validation_fraction: float = option(0.01, "share of documents held out", above=0, below=1)
    validation_documents: int = option(0, "hold out the first n documents; 0: a share", at_least=0)
    validation_path: str = option("", "text, jsonl, parquet: other files for validation")
    validation_split: str = option("", "hub: validate on this split, and train on all of split")
    max_documents: int = option(0, "read at most this many documents; 0: all", at_least=0)
    workers: int = option(0, "processes that tokenize; 0: one per core", at_least=0, at_most=1024)


def unused_options(config: DataConfig) -> set[str]:
    """Options that the chosen source, tokenizer or validation text leaves without a use."""
    unused = {name for name, sources in OF_SOURCES.items() if config.source not in sources}
    if config.tokenizer != "train" and "tokenizer" not in unused:
        unused.add("vocab_size")
    if config.packed:
        unused.add("cut")
    has_validation_text = config.validation_path or config.validation_split
    if has_validation_text:
        unused.add("validation_documents")
    if has_validation_text or config.validation_documents:
        unused.add("validation_fraction")
    return unused


def without_unused(config: DataConfig) -> DataConfig:
    """The same with the defaults of `unused_options`: nothing may look as if it had been read.
    Values of a wrong type stay, to be refused.
    """
    unused = unused_options(config)
    defaults = {
        item.name: item.default
        for item in fields(config)
        if item.name in unused and has_type(getattr(config, item.name), item.type)
    }
    return replace(config, **defaults)


def data_problems(config: DataConfig) -> list[str]:
    """One line for each rule broken by options that are allowed alone, but not together."""
    source = config.source
    problems = [
        f"data.{name} is {getattr(config, name)!r}, which source {source!r} does not read; allowed "
        f"with data.source {', '.join(readers)}: set one of these, or data.{name}="
        for name, readers in READ_BY.items()
        if getattr(config, name) and source not in readers
    ]
    if source in READ_BY["path"] and not config.path:
        problems.append(f"data.path is empty; source {source!r} needs a name or path there")
    if source == "builtin" and config.subset not in ("", "packages"):
        problems.append(f"data.subset is {config.subset!r}; source builtin allows packages")
    if config.pair_field and config.pair_field == config.text_field:
        problems.append(
            f"data.pair_field = {config.pair_field!r} is data.text_field too, so that both texts "
            "of a pair would be the same; allowed: another field, or none"
        )
    if config.validation_split and config.validation_split == config.split:
        problems.append(f"data.split and data.validation_split are both {config.split!r}")
    names_split = config.validation_split or config.split != DataConfig.split
    if source == "hub" and names_split and has_no_splits(config.path):
        remedy = "leave out data.split and data.validation_split"
        problems.append(f"{config.path} has no splits: {remedy}")
    return problems


def has_no_splits(path: str) -> bool:
    """Whether this is a folder that save_to_disk of datasets wrote for a dataset without splits."""
    return (as_path(path) / "state.json").is_file()


NOT_COMPARED = ("directory", "workers")  # settings that do not change what is written
# Data prepared by earlier versions lacks these settings. They are recorded only where they are set,
# so that such data, and checkpoints trained on it, still match.
ADDED_LATER = (
    "validation_path",
    "validation_split",
    "validation_documents",
    "cut",
    "pairs",
    "pair_field",
)


def manifest_settings(config: DataConfig) -> dict[str, Any]:
    """What the manifest records: the settings that decide what is written."""
    settings = asdict(without_unused(config))
    left_out = {*NOT_COMPARED}
    left_out.update(name for name in ADDED_LATER if not getattr(config, name))
    return {name: value for name, value in settings.items() if name not in left_out}


@dataclass(frozen=True)
class SplitManifest:
    """Counts of one split: `bytes` (UTF-8) and `words` of the text, `tokens` with EOS."""

    documents: int
    bytes: int
    words: int
    tokens: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a prepared directory holds. `fingerprint` is a hash over all else here."""

    dtype: str
    vocab_size: int
    eos_token_id: int
    tokenizer_sha256: str
    settings: dict
    splits: dict[str, SplitManifest]
    fingerprint: str
    tokenizer_files: dict[str, str] = field(default_factory=dict)  # SHA-256 of each by its name
    tokenizer_loses: str = ""  # of a sample of the text, in words; see tokenizer.lost_text

    @classmethod
    def of(cls, values: dict) -> "Manifest":
        """From the values of a manifest.json, with the fingerprint that they should have."""
        splits = {
            name: from_values(SplitManifest, counts) for name, counts in values["splits"].items()
        }
        return from_values(cls, values | {"splits": splits, "fingerprint": fingerprint(values)})

    @classmethod
    def load(cls, directory: str | Path) -> "Manifest":
        """Reads `directory`/manifest.json. Raises UserError if it is missing or damaged."""
        file = Path(directory) / "manifest.json"
        if not file.is_file():
            raise UserError(f"{directory} has no manifest.json: give a directory of prepared data")
        remedy = f"copy it again, or delete {directory} and prepare again"
        values = read_json(file, remedy)
        if values.get("fingerprint") != fingerprint(values):
            raise UserError(f"{file} is not what preparation wrote (fingerprint differs): {remedy}")
        return cls.of(values)

    def verify(self, directory: str | Path, splits: Iterable[str] = ()) -> None:
        """Raises UserError unless the files of the tokenizer and of the splits have their recorded
        SHA-256, which is compared once on each machine.
        """
        directory = Path(directory)
        tokenizer = self.tokenizer_files or {"tokenizer.json": self.tokenizer_sha256}
        recorded = {f"tokenizer/{name}": value for name, value in tokenizer.items()}
        for split in splits:
            recorded[f"{split}.bin"] = self.splits[split].tokens_sha256
            recorded[f"{split}.docs.bin"] = self.splits[split].documents_sha256
        if self.tokenizer_files:  # a file that was added may change what the tokenizer does
            for file in directory.glob("tokenizer/*.json"):
                recorded.setdefault(f"tokenizer/{file.name}", "none")
        for name, value in recorded.items():
            file = directory / name
            if not (file.is_file() and has_sha256(file, value)):
                problem = f"{file} is not what preparation wrote (its SHA-256 differs)"
                raise UserError(f"{problem}; restore it, or delete {directory} and prepare again")


def from_values(cls: type, values: dict) -> Any:
    """An instance of a dataclass; another version may have written more values than it has."""
    return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})


def fingerprint(values: dict) -> str:
    """The hash over the values of a manifest.json."""
    hashed = {name: values[name] for name in values if name not in ("format", "fingerprint")}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def existing_data(config: DataConfig) -> Manifest | None:
    """The manifest of `config.directory`, of data with these settings; None if nothing is there,
    and data can be written. Raises UserError for all else.
    """
    directory = as_path(config.directory)
    if not (directory / "manifest.json").is_file():
        files = (file for file in directory.glob("*") if not file.name.startswith(STAGE))
        if directory.is_file() or any(files):
            problem = (
                "is a file" if directory.is_file() else "holds other files, and no manifest.json"
            )
            raise UserError(f"data.directory {directory} {problem}; choose another one")
        check_writable(directory, "data.directory")
        return None
    manifest = Manifest.load(directory)
    settings = asdict(DataConfig()) | manifest_settings(config)
    prepared = asdict(DataConfig()) | manifest.settings
    changes = [
        f"  data.{name}: prepared with {prepared.get(name, '')!r}, now {settings.get(name, '')!r}\n"
        for name in sorted((settings | prepared).keys() - unused_options(config))
        if prepared.get(name) != settings.get(name)
    ]
    if changes:
        raise UserError(
            f"data.directory {directory} was prepared with other settings:\n{''.join(changes)}"
            "Choose another one, restore these settings, or delete it to prepare again"
        )
    manifest.verify(directory)
    return manifest
