"""Prepares data, once: documents become token files, a tokenizer and a manifest.

A directory of prepared data gets its name only when it is complete: everything is written beside
it, flushed to the disk, then renamed. A process that is killed leaves nothing that could be taken
for prepared data, and the next one goes on from what the token files hold (token_writer.py).
"""

import hashlib
import json
import os
import shutil
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mixer.common.checksums import sha256
from mixer.common.errors import Interrupted, UserError
from mixer.common.files import (
    as_system_error,
    missing_directories,
    publish,
    remove_empty,
    write_text,
)
from mixer.common.locks import locked
from mixer.common.say import Say
from mixer.data.config import DataConfig, check, unused_options, validation_source, without_unused
from mixer.data.corpus import (
    Corpus,
    FixedSplits,
    corpus_parts,
    fixed_splits,
    say_left_out,
    training_documents,
)
from mixer.data.manifest import Manifest, SplitManifest, fingerprint, tokenizer_files
from mixer.data.token_writer import PROGRESS_FILE, Progress, write_tokens
from mixer.data.tokenise import Counts, Tokenise
from mixer.data.tokenizer import (
    TrainingSample,
    existing_tokenizer,
    load_tokenizer,
    loss_of_text,
    train_tokenizer,
    vocabulary_size,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NOT_COMPARED = ("directory", "workers")  # settings that do not change what is written
# Settings that data prepared by earlier versions does not have. They are recorded only where they
# are set, so that such data, and checkpoints trained on it, still match.
ADDED_LATER = ("validation_path", "validation_split", "validation_documents", "cut", "pairs")
ADDED_LATER += ("pair_field",)
BOOT = Path("/proc/sys/kernel/random/boot_id")


def prepare(config: DataConfig, say: Say = print) -> Manifest:
    """Tokenise the corpus of `config` into `config.directory`, unless that was done already, and
    return its manifest.

    Safe to call from several processes at once: one works, the others wait and find it done.
    `say` is told how far it is. Files of the source that change later are not noticed: a directory
    stands for the settings it was made with. Raises UserError for a source that cannot be used (see
    `corpus.documents`) and for a directory that holds anything else than data of the same
    settings; nothing is ever overwritten, and a refusal leaves nothing behind.
    """
    check(config)
    # Before the lock, so that prepared data can be used where nothing can be written.
    if (manifest := _existing(config)) is not None:
        if manifest.tokenizer_loses:
            say(manifest.tokenizer_loses)
        return manifest
    directory = Path(config.directory).absolute()
    lock, missing = directory.with_name(f"{directory.name}.lock"), missing_directories(directory)
    wait = f"waiting for another process, which prepares {config.directory} ({lock} is its lock)"
    try:
        with locked(lock, lambda: say(wait)):
            return _existing(config) or _make(config, directory, say)
    except Exception as error:
        remove_empty(missing)
        system = as_system_error(error)
        if not isinstance(system, OSError):
            raise
        raise UserError(
            f"preparing {config.directory} failed: {system}. Check that there is space and that "
            "the files named can be read or written, or choose another data.directory"
        ) from error


def _make(config: DataConfig, directory: Path, say: Say) -> Manifest:
    """Write everything beside `directory`, then give it that name. The lock is held."""
    corpus = corpus_parts(config, say)
    fixed = fixed_splits(corpus, config)
    # The host is in the name because locks do not reach across machines on every shared file
    # system. On this host nobody else writes such a directory, since we hold the lock.
    partial = directory.with_name(f"{directory.name}.partial-{socket.gethostname()}")
    try:
        manifest = _write(config, corpus, fixed, partial, say)
        for file in partial.glob(f"{PROGRESS_FILE}*"):
            file.unlink()
    except UserError as error:
        if not isinstance(error, Interrupted):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    try:
        publish(partial, directory)
    except OSError:
        manifest = _existing(config)  # another machine was first
        if manifest is None:
            raise
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _identity(config: DataConfig, corpus: Corpus) -> str:
    """What an interrupted preparation must have in common with this one to be continued."""
    identities = repr([(split, part.identity) for split, part in corpus])
    # Nothing is flushed to the disk before the end, so after a crash of the machine the parts that
    # are there may not be whole.
    boot = BOOT.read_text().strip() if BOOT.is_file() else ""
    known = {"parts": hashlib.sha256(identities.encode()).hexdigest(), "boot": boot, "version": 2}
    return json.dumps(_settings(config) | known)


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
        for name in sorted((wanted | found).keys() - unused_options(config))
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
    settings = asdict(without_unused(config)).items()
    left_out = {*NOT_COMPARED, *(name for name in ADDED_LATER if not getattr(config, name))}
    return {name: value for name, value in settings if name not in left_out}


def _write(
    config: DataConfig, corpus: Corpus, fixed: FixedSplits, partial: Path, say: Say
) -> Manifest:
    """Write tokenizer, token files and manifest to `partial`, from where an earlier call ended."""
    identity = _identity(config, corpus)
    progress = Progress.load(partial, identity)
    if progress:
        say(f"going on after {progress.total.documents} documents")
    else:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        tokenizer, sample_bytes, loses = _tokenizer(config, corpus, fixed, say)
        tokenizer.save_pretrained(str(partial / "tokenizer"))
        progress = Progress(identity, sample_bytes, loses)
        progress.save(partial)
    tokenizer = load_tokenizer(partial)  # config.tokenizer may be another one by now
    vocab_size, eos = vocabulary_size(tokenizer), tokenizer.eos_token_id
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    specification = tokenizer.backend_tokenizer.to_str()
    are_pairs = bool(config.pair_field)
    task = Tokenise(specification, dtype, eos, config.validation_fraction, fixed, are_pairs)
    write_tokens(config, corpus, task, progress, partial, say)
    read = [(progress.total, config)]
    if held_out := validation_source(config):
        read = [(progress.splits["validation"], held_out), (progress.splits["train"], config)]
    for counts, source in read:
        say_left_out(counts.documents, counts.missing, source, say)
    values = {
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_token_id": eos,
        "tokenizer_sha256": sha256(partial / "tokenizer" / "tokenizer.json"),
        "tokenizer_bytes": progress.tokenizer_bytes,
        "tokenizer_files": tokenizer_files(partial),
        "tokenizer_loses": progress.tokenizer_loses,
        "settings": _settings(config),
        "splits": {name: _recorded(partial, name, c) for name, c in progress.splits.items()},
    }
    manifest = Manifest(**values, fingerprint=fingerprint(values))
    write_text(partial / "manifest.json", json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def _recorded(partial: Path, split: str, counts: Counts) -> SplitManifest:
    values = asdict(counts)
    del values["missing"]
    hashes = [sha256(partial / name) for name in (f"{split}.bin", f"{split}.docs.bin")]
    return SplitManifest(**values, tokens_sha256=hashes[0], documents_sha256=hashes[1])


def _tokenizer(
    config: DataConfig, corpus: Corpus, fixed: FixedSplits, say: Say
) -> tuple["PreTrainedTokenizerFast", int, str]:
    """The tokenizer, the bytes of text that it was trained on, and what it loses of the text."""
    texts = training_documents(corpus, config, fixed)
    if config.tokenizer != "train":
        tokenizer = existing_tokenizer(config.tokenizer)
        if loses := loss_of_text(tokenizer, texts):
            say(loses)
        return tokenizer, 0, loses
    # The trainer has threads of its own. Their number is read once, at first use.
    if config.workers:
        os.environ["RAYON_NUM_THREADS"] = str(config.workers)
    sample, began = TrainingSample(texts), time.perf_counter()
    tokenizer = train_tokenizer(sample, config.vocab_size)
    part = "the first " if sample.is_part else ""
    too_small = len(tokenizer) < config.vocab_size
    note = f" (the corpus is too small for {config.vocab_size})" if too_small else ""
    say(
        f"tokenizer: {len(tokenizer)} tokens, trained on {part}{sample.bytes / 1e6:.1f} MB "
        f"in {time.perf_counter() - began:.1f} s{note}"
    )
    return tokenizer, sample.bytes, ""
