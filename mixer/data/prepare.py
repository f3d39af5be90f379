"""Prepares data, once: documents become token files, a tokenizer and a manifest.

A directory of prepared data gets its name only when it is complete: everything is written beside
it, flushed to the disk, then renamed. A process that is killed leaves nothing that could be taken
for prepared data.
"""

import hashlib
import json
import os
import shutil
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mixer.common.errors import UserError
from mixer.common.files import locked, publish
from mixer.data.corpus import DataConfig, check, known_bytes, split_documents
from mixer.data.manifest import SPLITS, Manifest, SplitManifest, fingerprint
from mixer.data.tokenizer import (
    digest,
    existing_tokenizer,
    pieces,
    raw_encoder,
    train_tokenizer,
    vocabulary_size,
)

# The tokenizer is trained on at most this much text: enough for any vocabulary, and it limits the
# memory.
SAMPLE_BYTES = 100_000_000
BATCH_CHARACTERS = 4 << 20  # text tokenised in one call
REPORT_SECONDS = 5.0
NOT_COMPARED = ("directory", "workers")  # settings that do not change what is written
# Settings that data prepared by earlier versions does not have. They are recorded only where they
# are set, so that such data, and checkpoints trained on it, still match.
ADDED_LATER = ("validation_path", "validation_split")


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
    # Before the lock, so that prepared data can be used where nothing can be written.
    if (manifest := _existing(config)) is not None:
        return manifest
    directory = Path(config.directory).absolute()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with locked(directory.with_name(directory.name + ".lock")):
            return _existing(config) or _make(config, directory, progress)
    except OSError as error:
        raise UserError(
            f"preparing {config.directory} failed: {error}. Check that there is space and that the "
            "files named can be read or written, or choose another data.directory"
        ) from error


def _make(config: DataConfig, directory: Path, progress) -> Manifest:
    """Write everything beside `directory`, then give it that name. The lock is held."""
    # The host is in the name because locks do not reach across machines on every shared file
    # system. On this host nobody writes such a directory any more, since we hold the lock.
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
            f"data.directory {directory} exists and holds other files, no prepared data; choose "
            "another data.directory"
        )
    manifest = Manifest.load(directory)
    wanted, found = _settings(config), manifest.settings
    changed = [
        f"  data.{name}: prepared with {found.get(name, '')!r}, now {wanted.get(name, '')!r}\n"
        for name in sorted(wanted | found)
        if found.get(name) != wanted.get(name)
    ]
    if changed:
        raise UserError(
            f"data.directory {directory} was prepared with other settings:\n{''.join(changed)}"
            "Choose another data.directory, set these back, or delete the directory to prepare it "
            "anew"
        )
    manifest.verify(directory)
    return manifest


def _settings(config: DataConfig) -> dict:
    """What the manifest records: the settings that decide what is written."""
    settings = asdict(config).items()
    left_out = {*NOT_COMPARED, *(name for name in ADDED_LATER if not getattr(config, name))}
    return {name: value for name, value in settings if name not in left_out}


def _write(config: DataConfig, partial: Path, progress) -> Manifest:
    """Write tokenizer, token files and manifest to `partial`."""
    # The tokenizer's own threads do the work. Their number is read once in a process, at first use.
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
    manifest = Manifest(**values, fingerprint=fingerprint(values))
    (partial / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def _train(config: DataConfig, progress):
    """Train the BPE on the training documents, or their first SAMPLE_BYTES. Returns it and how many
    bytes it saw.
    """
    began, seen, truncated = time.perf_counter(), 0, False

    def sample():
        nonlocal seen, truncated
        for split, text in split_documents(config):
            if split != "train":
                continue
            if seen >= SAMPLE_BYTES:
                truncated = True
                return
            seen += len(text.encode())
            yield text

    tokenizer = train_tokenizer(sample(), config.vocab_size)
    part = "the first " if truncated else ""
    too_small = len(tokenizer) < config.vocab_size
    note = f" (the corpus is too small for {config.vocab_size})" if too_small else ""
    progress(
        f"tokenizer: {len(tokenizer)} tokens, trained on {part}{seen / 1e6:.1f} MB "
        f"in {time.perf_counter() - began:.1f} s{note}"
    )
    return tokenizer, seen


def _tokenise(config: DataConfig, encode, writers: dict[str, "_SplitWriter"], progress) -> None:
    """One pass over the documents: count, tokenise in batches, append to their split's files."""
    batch: list[tuple[_SplitWriter, str, bool]] = []  # split, text, whether it ends its document
    waiting = 0

    def flush():
        encoded = encode([text for _, text, _ in batch])
        for (writer, _, ends), ids in zip(batch, encoded, strict=True):
            writer.add(ids, ends)
        batch.clear()

    with _Meter(known_bytes(config), progress) as meter:
        for split, text in split_documents(config):
            writer = writers[split]
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
    """Writes one split's tokens and document ends to their files as a stream, and counts and hashes
    them.
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
    """Reports the progress of tokenising: a bar on a terminal, else a line every few seconds. At
    the end it gives one line in either case.
    """

    def __init__(self, total: int | None, progress):
        self.total, self.progress = total, progress
        self.bar, self.began = None, time.perf_counter()
        self.reported = self.began

    def __enter__(self) -> "_Meter":
        if self.progress is print and sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
            self.bar = Progress(*columns)
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def report(self, writers, last: bool = False) -> None:
        now = time.perf_counter()
        documents = sum(writer.documents for writer in writers)
        size = sum(writer.bytes for writer in writers)
        tokens = sum(writer.tokens for writer in writers)
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
    """Gives `partial` its name. Raises FileExistsError if the name is taken."""
    try:
        publish(partial, directory)
    except OSError as error:
        if directory.exists():
            raise FileExistsError(str(directory)) from error
        raise
