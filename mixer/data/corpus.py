"""Where documents come from: the settings of the data, and one iterator of texts whatever the
source.

A document is one `str`. Sources are read as a stream, so memory stays flat however large the corpus
is; local text files are the exception, read one whole file at a time.
"""

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
SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"),
    "parquet": (".parquet",),
}
BUILTIN_SUBSETS = ("", "packages")
LEFT_OUT_OF_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}


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
    max_documents: int = option(0, "read only this many documents; 0: all", at_least=0)
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


def documents(config: DataConfig) -> Iterator[str]:
    """Every document of the source, in an order that does not change; empty ones (nothing but white
    space) are left out.

    Raises UserError for a missing file or dataset, text that is not UTF-8, a missing text field, or
    a source without documents.
    """
    check(config)
    texts = (text for text in _texts(config) if text and not text.isspace())
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
    """The split of document `index`: "train" or "validation".

    It follows a hash of the text, so a document keeps its side when the corpus grows or is
    reordered, and exact copies of it land on the same side. The first two documents are fixed, so
    that neither split is empty once there are two documents.
    """
    if index < 2:
        return "validation" if index else "train"
    return "validation" if _hash(text) < validation_fraction * 2**64 else "train"


def _hash(text: str) -> int:
    """64 bits, the same on every machine."""
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


def known_bytes(config: DataConfig) -> int | None:
    """Size of the whole source in bytes where that is cheap to know, else None; for the progress
    bar only.
    """
    if config.max_documents or config.source not in ("builtin", "text"):
        return None
    files = _builtin_files(config.subset) if config.source == "builtin" else _local_files(config)
    return sum(file.stat().st_size for file in files)


def _texts(config: DataConfig) -> Iterator[str]:
    if config.source == "builtin":
        return _builtin_texts(config.subset)
    if config.source == "text":
        return map(_read_text, _local_files(config))
    return _row_texts(config)


# --- the standard library, and the installed packages -----------------------------------------------------------------


def _builtin_files(subset: str) -> list[Path]:
    """The same files in the same order on every machine with this Python (and these packages)."""
    paths = sysconfig.get_paths()
    library = _python_files(Path(paths["stdlib"]))
    files = [
        (name, file)
        for name, file in library
        if not LEFT_OUT_OF_BUILTIN.intersection(Path(name).parts)
    ]
    if not subset:
        return [file for _, file in sorted(files)]
    for folder in {Path(paths[kind]).resolve() for kind in ("purelib", "platlib")}:
        files += _python_files(folder)
    # By a hash of the name, which mixes the packages: the first data.max_documents are of all of
    # them.
    return [file for _, file in sorted((_hash(name), file) for name, file in files)]


def _python_files(folder: Path) -> list[tuple[str, Path]]:
    """Each Python file below a folder, after its name from there: posix, so that it sorts alike
    everywhere.
    """
    return [
        (file.relative_to(folder).as_posix(), file)
        for file in folder.rglob("*.py")
        if file.is_file()
    ]


def _builtin_texts(subset: str) -> Iterator[str]:
    seen: set[int] = set()
    for file in _builtin_files(subset):
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # the standard library's tests hold a few files in other encodings, on purpose
        if subset:  # packages hold copies of each other's files
            key = _hash(text)
            if key in seen:
                continue
            seen.add(key)
        yield text


# --- local files ------------------------------------------------------------------------------------------------------


def _local_files(config: DataConfig) -> list[Path]:
    """The files that `path` names, sorted. In a directory: all that are not hidden, or those with
    the source's suffixes.
    """
    path = Path(config.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = SUFFIXES.get(config.source, ("",))
        files = [
            file for file in path.rglob("*") if file.is_file() and file.name.endswith(suffixes)
        ]
        files = [
            file
            for file in files
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        wanted = "" if suffixes == ("",) else f" ending in {', '.join(suffixes)}"
        problem = f"the corpus is empty: directory {config.path} holds no file{wanted}"
    else:
        files = [
            Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()
        ]
        problem = f"data.path {config.path!r} is no file or directory, and as a glob it matches no file; correct data.path"
    if not files:
        raise UserError(problem)
    return sorted(files, key=Path.as_posix)


def _read_text(file: Path) -> str:
    raw = file.read_bytes()  # bytes, not text mode: line ends stay as they are
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}. Convert it "
            f"(for example `iconv -f LATIN1 -t UTF-8 {file}`), or leave it out of data.path"
        ) from None


# --- rows: jsonl, parquet, hub ----------------------------------------------------------------------------------------


def _open_rows(config: DataConfig):
    from datasets import load_dataset

    if config.source == "hub":
        return load_dataset(config.path, config.subset or None, split=config.split, streaming=True)
    builder = "json" if config.source == "jsonl" else "parquet"
    # glob.escape: `datasets` would read a [ or * in a file's own name as a pattern
    files = [glob.escape(str(file.absolute())) for file in _local_files(config)]
    return load_dataset(builder, data_files=files, split="train", streaming=True)


def _row_texts(config: DataConfig) -> Iterator[str]:
    name, index = config.text_field, 0
    what = " ".join(filter(None, (config.source, config.path, config.subset)))
    rows = _guarded(lambda: iter(_open_rows(config)), what, "the start") or iter(())
    while (row := _guarded(lambda: next(rows, None), what, f"or after row {index}")) is not None:
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


def _guarded(step, what: str, where: str):
    """`step()`, with what `datasets` raises (its own, pyarrow's, the network's) as one readable
    error.
    """
    try:
        return step()
    except UserError:
        raise
    except StopIteration:  # how `datasets` says that the files hold no row at all
        return None
    except Exception as error:
        raise UserError(
            f"cannot read {what} at {where}: {type(error).__name__}: {error}. "
            "Check data.path, data.subset and data.split (eval.py: --text or --hub, --subset, --split), and that the files are "
            "whole (or the network reachable)"
        ) from error
