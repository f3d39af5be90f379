"""Preparation: documents -> token files, tokenizer and manifest, once.

A directory of prepared data appears under its name only when complete: everything is written beside
it, flushed to the disk, then renamed. A process that is killed leaves nothing that could be taken
for data.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mixer.common.errors import UserError
from mixer.common.files import flush, flush_tree
from mixer.data.corpus import DataConfig, check, documents, known_bytes, split_of
from mixer.data.manifest import SPLITS, Manifest, SplitManifest
from mixer.data.tokenizer import (
    digest,
    existing_tokenizer,
    pieces,
    raw_encoder,
    train_tokenizer,
    vocabulary_size,
)

# The tokenizer is trained on at most so much text: enough for any vocabulary, and memory stays
# flat.
SAMPLE_BYTES = 100_000_000
BATCH_CHARACTERS = 4 << 20  # text tokenised in one call
REPORT_SECONDS = 5.0
NOT_COMPARED = ("directory", "workers")  # settings that do not change what is written


def prepare(config: DataConfig, progress=print) -> Manifest:
    """Tokenise the corpus of `config` into `config.directory`, unless that was done already, and
    return its manifest.

    Safe to call from several processes at once: one works, the others wait and find it done.
    `progress` takes lines of text; with the default, a terminal gets a bar. Files of the source
    that change later are not noticed: a directory stands for the settings it was made with. Raises
    UserError for a source that cannot be used (see `corpus.documents`) and for a directory that
    holds anything else than data of the same settings; nothing is ever overwritten.
    """
    check(config)
    if (
        manifest := _existing(config)
    ) is not None:  # before the lock, so that read-only prepared data can be used
        return manifest
    directory = Path(config.directory).absolute()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_name(directory.name + ".lock")):
            return _existing(config) or _make(config, directory, progress)
    except OSError as error:
        raise UserError(
            f"preparing {config.directory} failed: {error}. Check that there is space and that the files named can be "
            "read or written, or choose another data.directory"
        ) from error


def _make(config: DataConfig, directory: Path, progress) -> Manifest:
    """Write everything beside `directory`, then give it that name. The lock is held."""
    # The host is in the name as locks do not reach across machines on every shared file system: of
    # this one, whoever wrote such a directory is dead, since we hold the lock.
    prefix = f"{directory.name}.partial-{socket.gethostname()}-"
    for stale in [path for path in directory.parent.iterdir() if path.name.startswith(prefix)]:
        shutil.rmtree(stale, ignore_errors=True)
    partial = directory.with_name(f"{prefix}{os.getpid()}")
    try:
        partial.mkdir()
        manifest = _write(config, partial, progress)
        _publish(partial, directory)
    except FileExistsError:  # another machine was first
        if (manifest := _existing(config)) is None:
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _existing(config: DataConfig) -> Manifest | None:
    """The manifest of `config.directory` if it holds data of these settings; None if there is
    nothing there.
    """
    directory = Path(config.directory)
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    if not (directory / "manifest.json").is_file():
        raise UserError(
            f"data.directory {directory} exists and holds other files, no prepared data; choose another data.directory"
        )
    manifest = Manifest.load(directory)
    wanted, found = _settings(config), manifest.settings
    changed = [
        f"  data.{name}: prepared with {found.get(name)!r}, now {wanted.get(name)!r}"
        for name in sorted(wanted | found)
        if found.get(name) != wanted.get(name)
    ]
    if changed:
        raise UserError(
            f"data.directory {directory} was prepared with other settings:\n"
            + "\n".join(changed)
            + "\n"
            "Choose another data.directory, set these back, or delete the directory to prepare it anew"
        )
    manifest.verify(directory)
    return manifest


def _settings(config: DataConfig) -> dict:
    return {name: value for name, value in asdict(config).items() if name not in NOT_COMPARED}


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock that the system drops when this process dies. Removing it would be a
    race: it stays.
    """
    with open(file, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write(config: DataConfig, partial: Path, progress) -> Manifest:
    """Tokenizer, token files and manifest into `partial`."""
    # The tokenizer's own threads do the work. They start once in a process: only its first use sets
    # their number.
    if config.workers:
        os.environ["RAYON_NUM_THREADS"] = str(config.workers)
    tokenizer_bytes = 0
    if config.tokenizer == "train":
        tokenizer, tokenizer_bytes = _train(config, progress)
    else:
        tokenizer = existing_tokenizer(config.tokenizer)
    tokenizer.save_pretrained(str(partial / "tokenizer"))
    vocab_size = vocabulary_size(tokenizer)
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    writers = {name: _SplitWriter(partial, name, dtype, tokenizer.eos_token_id) for name in SPLITS}
    _tokenise(config, raw_encoder(tokenizer), writers, progress)
    splits = {name: writer.finish() for name, writer in writers.items()}
    if not splits["validation"].documents:
        raise UserError(
            f"the corpus ({config.source} {config.path}) is a single document, so none is left "
            "for validation: each split holds whole documents. Give at least two documents"
        )
    values = {
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "tokenizer_sha256": digest(partial / "tokenizer"),
        "tokenizer_bytes": tokenizer_bytes,
        "settings": _settings(config),
        "splits": splits,
    }
    known = json.dumps(
        values | {"splits": {name: asdict(split) for name, split in splits.items()}}, sort_keys=True
    )
    manifest = Manifest(**values, fingerprint=hashlib.sha256(known.encode()).hexdigest())
    (partial / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def _train(config: DataConfig, progress):
    """Train the BPE on the training documents, or their first SAMPLE_BYTES. Returns it and how many
    bytes it saw.
    """
    began, seen, truncated = time.perf_counter(), 0, False

    def sample():
        nonlocal seen, truncated
        for index, text in enumerate(documents(config)):
            if split_of(index, text, config.validation_fraction) != "train":
                continue
            if seen >= SAMPLE_BYTES:
                truncated = True
                return
            seen += len(text.encode())
            yield text

    tokenizer = train_tokenizer(sample(), config.vocab_size)
    part = "the first " if truncated else ""
    progress(
        f"tokenizer: {len(tokenizer)} tokens, trained on {part}{seen / 1e6:.1f} MB "
        f"in {time.perf_counter() - began:.1f} s"
        + (
            f" (the corpus is too small for {config.vocab_size})"
            if len(tokenizer) < config.vocab_size
            else ""
        )
    )
    return tokenizer, seen


def _tokenise(config: DataConfig, encode, writers: dict[str, "_SplitWriter"], progress) -> None:
    """One pass over the documents: count, tokenise in batches, append to their split's files."""
    batch: list[tuple[_SplitWriter, str, bool]] = []  # split, text, whether it ends its document
    waiting = 0

    def flush():
        for (writer, _, ends), ids in zip(
            batch, encode([text for _, text, _ in batch]), strict=True
        ):
            writer.add(ids, ends)
        batch.clear()

    with _Meter(known_bytes(config), progress) as meter:
        for index, text in enumerate(documents(config)):
            writer = writers[split_of(index, text, config.validation_fraction)]
            writer.count(text)
            parts = list(pieces(text))
            batch += [(writer, part, number == len(parts)) for number, part in enumerate(parts, 1)]
            waiting += len(text)
            if waiting >= BATCH_CHARACTERS:
                flush()
                waiting = 0
                meter.report(writers.values())
        flush()
        meter.report(writers.values(), last=True)


class _SplitWriter:
    """Streams one split's tokens and document ends to their files, counting and hashing on the
    way.
    """

    def __init__(self, directory: Path, name: str, dtype: str, eos: int):
        self.dtype, self.eos = np.dtype(dtype).newbyteorder("<"), eos
        self.documents = self.bytes = self.words = self.tokens = self.max_token_id = 0
        self.files = [
            open(directory / f"{name}.bin", "wb"),
            open(directory / f"{name}.docs.bin", "wb"),
        ]
        self.hashes = [hashlib.sha256(), hashlib.sha256()]

    def count(self, text: str) -> None:
        self.bytes += len(text.encode())
        self.words += len(text.split())

    def add(self, ids: list[int], ends_document: bool) -> None:
        tokens = np.array(ids + [self.eos] if ends_document else ids, dtype=self.dtype)
        self._append(0, tokens)
        self.tokens += len(tokens)
        self.max_token_id = max(self.max_token_id, int(tokens.max(initial=0)))
        if ends_document:
            self.documents += 1
            self._append(1, np.array([self.tokens], dtype="<u8"))

    def _append(self, file: int, values: np.ndarray) -> None:
        data = values.tobytes()
        self.files[file].write(data)
        self.hashes[file].update(data)

    def finish(self) -> SplitManifest:
        for file in self.files:
            file.close()
        counts = (self.documents, self.bytes, self.words, self.tokens, self.max_token_id)
        return SplitManifest(*counts, *(known.hexdigest() for known in self.hashes))


class _Meter:
    """How far the tokenising is: a bar on a terminal, else a line every few seconds; one line at
    the end.
    """

    def __init__(self, total: int | None, progress):
        self.total, self.progress = total, progress
        self.bar, self.began = None, time.perf_counter()
        self.reported = self.began

    def __enter__(self) -> "_Meter":
        if self.progress is print and sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
            )
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def report(self, writers, last: bool = False) -> None:
        now = time.perf_counter()
        documents, size, tokens = (
            sum(getattr(writer, name) for writer in writers)
            for name in ("documents", "bytes", "tokens")
        )
        seconds = max(now - self.began, 1e-9)
        line = (
            f"tokenised: {documents} documents, {size / 1e6:.1f} MB, {tokens / 1e6:.2f} M tokens "
            f"in {seconds:.1f} s ({size / seconds / 1e6:.2f} MB/s, {tokens / seconds:.0f} tokens/s)"
        )
        if self.bar:
            self.bar.update(self.task, completed=size, description=line)
        if last or (not self.bar and now - self.reported > REPORT_SECONDS):
            self.reported = now
            self.progress(line)


def _publish(partial: Path, directory: Path) -> None:
    """Flush every file and folder of `partial` to the disk, then give it its name. FileExistsError
    if that is taken.
    """
    flush_tree(partial)
    try:
        os.rename(partial, directory)  # replaces an empty directory, and nothing else
    except OSError as error:
        if directory.exists():
            raise FileExistsError(str(directory)) from error
        raise
    flush(directory.parent)
