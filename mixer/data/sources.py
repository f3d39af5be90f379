"""Where documents come from: each source is cut into shards, which processes can read (readers.py)
independently of each other.

The shards of a source, one after the other, give its documents in an order that does not change.
Nothing that is written may depend on where one shard ends and the next begins.
"""

import functools
import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mixer.common.errors import UserError
from mixer.data.config import DataConfig

SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"),
    "parquet": (".parquet",),
}
LEFT_OUT_OF_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}
# Of text in a shard, where a source can be cut: enough for a worker to do something, and little to
# do again after a kill. Files of one document, compressed files and files of the hub can be longer.
SHARD_BYTES = 4 << 20


@dataclass(frozen=True)
class Shard:
    """A part of a source. start, stop: bytes of a jsonl file; row groups of a parquet file; for the
    hub, the number of this part of the dataset and the number of all of them.
    """

    config: DataConfig
    options: tuple[str, ...]  # for errors: the options that say where the source is
    files: tuple[Path, ...] = ()
    start: int = 0
    stop: int = 0
    bytes: int = 0  # on the disk, where that is known
    revision: str | None = None  # of a dataset of the hub

    @property
    def identity(self) -> tuple:
        """What shows whether the same shard was meant earlier, and whether its files changed."""
        stats = [file.stat() for file in self.files]
        files = [
            (str(file.absolute()), stat.st_size, stat.st_mtime_ns)
            for file, stat in zip(self.files, stats, strict=True)
        ]
        return files, self.start, self.stop, self.revision


def source_shards(config: DataConfig, options: tuple[str, ...]) -> list[Shard]:
    """The shards of the source, in order. Raises UserError if it cannot be found or opened."""
    if config.source == "hub":
        return _hub_shards(config, options)
    if config.source == "builtin":
        return _groups_of_files(config, options, _builtin_files(config))
    files = local_files(config, options)
    if config.source == "text":
        return _groups_of_files(config, options, files)
    cut = _jsonl_shards if config.source == "jsonl" else _parquet_shards
    return [shard for file in files for shard in cut(config, options, file)]


def text_hash(text: str) -> int:
    """64 bits, the same on every machine."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


# --- the standard library, and the installed packages ------------------------


def _builtin_files(config: DataConfig) -> list[Path]:
    """The same files in the same order on every machine with this Python (and these packages)."""
    paths = sysconfig.get_paths()
    files = [
        (name, file)
        for name, file in _python_files(Path(paths["stdlib"]))
        if not LEFT_OUT_OF_BUILTIN.intersection(Path(name).parts)
    ]
    if not config.subset:
        return [file for _, file in sorted(files)]
    for folder in {Path(paths[kind]).resolve() for kind in ("purelib", "platlib")}:
        files += _python_files(folder)
    # Sorted by a hash of the name, which mixes the packages: any first data.max_documents are a
    # sample of all of them.
    mixed = [file for _, file in sorted((text_hash(name), file) for name, file in files)]
    return _without_copies(mixed, config.max_documents)


def _without_copies(files: list[Path], most: int) -> list[Path]:
    """The first `most` files (0: all) that hold text that no file before them holds: packages hold
    copies of each other's files.
    """
    seen: dict[int, Path] = {}
    for file in files:
        for text in decoded_files([file]):
            if text and not text.isspace():
                seen.setdefault(text_hash(text), file)
        if most and len(seen) == most:
            break
    return list(seen.values())


def _python_files(folder: Path) -> list[tuple[str, Path]]:
    """(name, file) of each Python file below a folder. The name is relative to the folder, with
    posix separators, so that it sorts the same everywhere.
    """
    files = (file for file in folder.rglob("*.py") if file.is_file())
    return [(file.relative_to(folder).as_posix(), file) for file in files]


def decoded_files(files: Iterable[Path]) -> Iterator[str]:
    """The text of each Python file that is UTF-8."""
    for file in files:
        try:
            yield file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # on purpose, a few tests of the standard library are in other encodings


# --- local files -------------------------------------------------------------


def local_files(config: DataConfig, options: tuple[str, ...]) -> list[Path]:
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


def _groups_of_files(
    config: DataConfig, options: tuple[str, ...], files: list[Path]
) -> list[Shard]:
    """Consecutive files, together of about SHARD_BYTES."""
    groups, group, size = [], [], 0
    for file in files:
        group.append(file)
        size += file.stat().st_size
        if size >= SHARD_BYTES or file is files[-1]:
            groups.append(Shard(config, options, tuple(group), bytes=size))
            group, size = [], 0
    return groups


# --- rows: jsonl, parquet, hub -----------------------------------------------


def _jsonl_shards(config: DataConfig, options: tuple[str, ...], file: Path) -> Iterator[Shard]:
    """Ranges of bytes. A file without a row a line (compressed, a JSON array) is one shard that
    `datasets` reads, with stop = 0.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        first = opened.readline().strip()
    if not (first.startswith(b"{") and first.endswith(b"}")):
        yield Shard(config, options, (file,), bytes=size)
        return
    for start in range(0, size, SHARD_BYTES):
        stop = min(start + SHARD_BYTES, size)
        yield Shard(config, options, (file,), start, stop, stop - start)


def _parquet_shards(config: DataConfig, options: tuple[str, ...], file: Path) -> Iterator[Shard]:
    """Ranges of row groups, together of about SHARD_BYTES."""
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as opened:
            sizes = [
                opened.metadata.row_group(group).total_byte_size
                for group in range(opened.metadata.num_row_groups)
            ]
    except Exception as error:
        raise UserError(
            f"cannot read parquet {file}: {type(error).__name__}: {error}. Check "
            f"{', '.join(options)}, and that the file is whole"
        ) from error
    start, size = 0, 0
    for group, group_size in enumerate(sizes, 1):
        size += group_size
        if size >= SHARD_BYTES or group == len(sizes):
            yield Shard(config, options, (file,), start, group, size)
            start, size = group, 0


def _hub_shards(config: DataConfig, options: tuple[str, ...]) -> list[Shard]:
    """A shard for each file of the dataset."""
    revision = _hub_revision(config.path)
    whole = Shard(config, options, stop=1, revision=revision)
    # Finds a wrong name, subset or split now, with the error that reading it would give.
    try:
        rows = open_dataset(config.path, config.subset, config.split, revision)
    except Exception:
        return [whole]
    count = rows.num_shards if hasattr(rows, "shard") else 1  # datasets 3.0 has no shards
    return [Shard(config, options, (), part, count, 0, revision) for part in range(count)]


def _hub_revision(name: str) -> str | None:
    """The dataset's commit at this moment, so that all workers read the same. None for a local
    directory, and where the hub cannot be asked.
    """
    if Path(name).exists():
        return None
    try:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(name).sha
    except Exception:
        return None


@functools.lru_cache(maxsize=2)  # opening lists the files of the dataset, maybe over a network
def open_dataset(path: str, subset: str, split: str, revision: str | None):
    from datasets import load_dataset

    return load_dataset(path, subset or None, split=split, revision=revision, streaming=True)
