"""The documents of a corpus: the settings that name them, one iterator over them whatever the
source, and the split of each.

A document is one `str`. Sources are read as a stream, so memory use does not grow with the corpus.
Local text files are the exception: each is read whole, one at a time.
"""

import dataclasses
import glob
import hashlib
import itertools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mixer.common.errors import UserError
from mixer.common.options import option, option_problems

SMALLEST_VOCABULARY = 257  # 256 bytes and <|endoftext|>
FILE_SOURCES = ("text", "jsonl", "parquet")
SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"),
    "parquet": (".parquet",),
}
BUILTIN_SUBSETS = ("", "packages")
LEFT_OUT_OF_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}
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
    workers: int = option(0, "threads that tokenise; 0: one for each core", at_least=0)


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


def split_documents(config: DataConfig) -> Iterator[tuple[str, str]]:
    """(split, text) of every document, in an order that does not change. Raises as `documents`."""
    held_out = validation_source(config)
    if held_out is None:
        for index, text in enumerate(documents(config)):
            yield split_of(index, text, config.validation_fraction), text
        return
    check(config)
    # Errors in the validation text are found now, not after hours with the training text.
    next(documents(held_out, VALIDATION_OPTIONS))
    _refuse_common_files(config, held_out)
    for text in documents(config):
        yield "train", text
    for text in documents(held_out, VALIDATION_OPTIONS):
        yield "validation", text


def _refuse_common_files(config: DataConfig, held_out: DataConfig) -> None:
    if config.source not in FILE_SOURCES:
        return
    held_out_files = {file.resolve() for file in _local_files(held_out, VALIDATION_OPTIONS)}
    common = [file for file in _local_files(config) if file.resolve() in held_out_files]
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
    texts = (text for text in _texts(config, options) if text and not text.isspace())
    found = 0
    for text in itertools.islice(texts, config.max_documents or None):
        found += 1
        yield text
    if not found:
        where = "the standard library" if config.source == "builtin" else config.path
        raise UserError(
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
    return "validation" if _hash(text) < validation_fraction * 2**64 else "train"


def _hash(text: str) -> int:
    """64 bits, the same on every machine."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def known_bytes(config: DataConfig) -> int | None:
    """Bytes of all documents where that is cheap to know, else None; for the progress bar only."""
    if config.max_documents or config.source not in ("builtin", "text"):
        return None
    if config.source == "builtin":
        files = _builtin_files(config.subset)
    else:
        held_out = validation_source(config)
        files = _local_files(config) + (_local_files(held_out) if held_out else [])
    return sum(file.stat().st_size for file in files)


def _texts(config: DataConfig, options: tuple[str, ...]) -> Iterator[str]:
    if config.source == "builtin":
        return _builtin_texts(config.subset)
    if config.source == "text":
        return map(_read_text, _local_files(config, options))
    return _row_texts(config, options)


# --- the standard library, and the installed packages ------------------------


def _builtin_files(subset: str) -> list[Path]:
    """The same files in the same order on every machine with this Python (and these packages)."""
    paths = sysconfig.get_paths()
    files = [
        (name, file)
        for name, file in _python_files(Path(paths["stdlib"]))
        if not LEFT_OUT_OF_BUILTIN.intersection(Path(name).parts)
    ]
    if not subset:
        return [file for _, file in sorted(files)]
    for folder in {Path(paths[kind]).resolve() for kind in ("purelib", "platlib")}:
        files += _python_files(folder)
    # Sorted by a hash of the name, which mixes the packages: any first data.max_documents are a
    # sample of all of them.
    return [file for _, file in sorted((_hash(name), file) for name, file in files)]


def _python_files(folder: Path) -> list[tuple[str, Path]]:
    """(name, file) of each Python file below a folder. The name is relative to the folder, with
    posix separators, so that it sorts the same everywhere.
    """
    files = (file for file in folder.rglob("*.py") if file.is_file())
    return [(file.relative_to(folder).as_posix(), file) for file in files]


def _builtin_texts(subset: str) -> Iterator[str]:
    seen: set[int] = set()
    for file in _builtin_files(subset):
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # on purpose, a few tests of the standard library are in other encodings
        if subset:  # packages hold copies of each other's files
            key = _hash(text)
            if key in seen:
                continue
            seen.add(key)
        yield text


# --- local files -------------------------------------------------------------


def _local_files(config: DataConfig, options: tuple[str, ...] = CORPUS_OPTIONS) -> list[Path]:
    """The files that `path` names, sorted. In a directory: all that are not hidden and, for jsonl
    and parquet, have one of the source's suffixes.
    """
    path = Path(config.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = SUFFIXES.get(config.source, ("",))
        files = [
            file
            for file in path.rglob("*")
            if file.is_file()
            and file.name.endswith(suffixes)
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        wanted = "" if suffixes == ("",) else f" ending in {', '.join(suffixes)}"
        problem = f"the corpus is empty: directory {config.path} holds no file{wanted}"
    else:
        names = map(Path, glob.glob(str(path), recursive=True))
        files = [name for name in names if name.is_file()]
        problem = (
            f"{options[0]} {config.path!r} is no file or directory, and as a glob it matches no "
            f"file; correct {options[0]}"
        )
    if not files:
        raise UserError(problem)
    return sorted(files, key=Path.as_posix)


def _read_text(file: Path) -> str:
    raw = file.read_bytes()  # bytes, not text mode: line ends stay as they are
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}. "
            f"Convert it (for example `iconv -f LATIN1 -t UTF-8 {file}`), or leave it out"
        ) from None


# --- rows: jsonl, parquet, hub -----------------------------------------------


def _open_rows(config: DataConfig, options: tuple[str, ...]):
    from datasets import load_dataset

    if config.source == "hub":
        return load_dataset(config.path, config.subset or None, split=config.split, streaming=True)
    builder = "json" if config.source == "jsonl" else "parquet"
    # glob.escape: `datasets` would read a [ or * in a file's own name as a pattern
    files = [glob.escape(str(file.absolute())) for file in _local_files(config, options)]
    return load_dataset(builder, data_files=files, split="train", streaming=True)


def _row_texts(config: DataConfig, options: tuple[str, ...]) -> Iterator[str]:
    name, index = config.text_field, 0
    what = " ".join(filter(None, (config.source, config.path, config.subset)))

    def guarded(step, where: str):
        return _guarded(step, f"{what} at {where}", options)

    rows = guarded(lambda: iter(_open_rows(config, options)), "the start") or iter(())
    while (row := guarded(lambda: next(rows, None), f"or after row {index}")) is not None:
        if name not in row:
            raise UserError(
                f"{what}: row {index} has no field {name!r}; its fields: {', '.join(sorted(row))}. "
                "Give one of them as data.text_field (eval.py: --text-field)"
            )
        text = row[name]
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"{what}: field {name!r} of row {index} holds {type(text).__name__}, not text; "
                "give a field of text as data.text_field (eval.py: --text-field)"
            )
        yield text or ""
        index += 1


def _guarded(step, what: str, options: tuple[str, ...]):
    """The result of `step()`. Whatever `datasets` raises (its own errors, pyarrow's, the network's)
    becomes one readable UserError.
    """
    try:
        return step()
    except UserError:
        raise
    except StopIteration:  # how `datasets` says that the files hold no row at all
        return None
    except Exception as error:
        raise UserError(
            f"cannot read {what}: {type(error).__name__}: {error}. Check {', '.join(options)} "
            "(eval.py: --text or --hub, --subset, --split), and that the files are whole (or the "
            "network reachable)"
        ) from error
