"""Prepares data, once: documents become token files, a tokenizer and a manifest.

Worker processes tokenise the shards of the source, each into a directory of its own
(tokenise_all.py). This process appends finished shards to the token files, in their order, so the
files do not depend on the number of workers (append.py).

A directory of prepared data gets its name only when it is complete: everything is written beside
it, flushed to the disk, then renamed. A process that is killed leaves nothing that could be taken
for prepared data, and the next one goes on from the shards that are finished.
"""

import hashlib
import json
import os
import shutil
import socket
import time
from dataclasses import asdict
from pathlib import Path

from mixer.common.checksums import sha256
from mixer.common.errors import Interrupted, UserError
from mixer.common.files import (
    as_system_error,
    flush_tree,
    missing_directories,
    publish,
    remove_empty,
    write_text,
)
from mixer.common.locks import locked
from mixer.common.say import Say
from mixer.data.append import SplitFiles
from mixer.data.config import DataConfig, check, unused_options, validation_source, without_unused
from mixer.data.corpus import (
    FixedSplits,
    SplitShards,
    fixed_splits,
    say_left_out,
    split_shards,
    training_documents,
)
from mixer.data.manifest import SPLITS, Manifest, SplitManifest, fingerprint, tokenizer_files
from mixer.data.progress import PROGRESS_FILE, Progress
from mixer.data.tokenise import Counts, TokeniseShard
from mixer.data.tokenise_all import tokenise_all
from mixer.data.tokenizer import (
    TRAINING_PIECE,
    existing_tokenizer,
    load_tokenizer,
    loss_of_text,
    pieces,
    train_tokenizer,
    vocabulary_size,
)

# The tokenizer is trained on at most this much text: enough for any vocabulary, and it limits the
# memory.
SAMPLE_BYTES = 100_000_000
NOT_COMPARED = ("directory", "workers")  # settings that do not change what is written
# Settings that data prepared by earlier versions does not have. They are recorded only where they
# are set, so that such data, and checkpoints trained on it, still match.
ADDED_LATER = ("validation_path", "validation_split")
IDENTITY_FILE = "identity.json"
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
        with locked(lock, lambda: say(wait), remove=True):
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
    shards = split_shards(config, say)
    fixed = fixed_splits(shards, config)
    # The host is in the name because locks do not reach across machines on every shared file
    # system. On this host nobody else writes such a directory, since we hold the lock.
    partial = directory.with_name(f"{directory.name}.partial-{socket.gethostname()}")
    identity = _identity(config, shards)
    known = partial / IDENTITY_FILE
    if not known.is_file() or known.read_text() != identity:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write_text(known, identity)
    try:
        if not (partial / "manifest.json").is_file():
            _write(config, shards, fixed, partial, say)
        manifest = Manifest.load(partial)
    except UserError as error:
        if not isinstance(error, Interrupted):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    try:
        _publish(partial, directory)
    except FileExistsError:  # another machine was first
        shutil.rmtree(partial, ignore_errors=True)
        if (manifest := _existing(config)) is None:
            raise
    return manifest


def _identity(config: DataConfig, shards: SplitShards) -> str:
    """What an interrupted preparation must have in common with this one to be continued."""
    identities = repr([(split, shard.identity) for split, shard in shards])
    # Nothing is flushed to the disk before the end, so after a crash of the machine the parts that
    # are there may not be whole.
    boot = BOOT.read_text().strip() if BOOT.is_file() else ""
    known = {"shards": hashlib.sha256(identities.encode()).hexdigest(), "boot": boot}
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
    config: DataConfig, shards: SplitShards, fixed: FixedSplits, partial: Path, say: Say
) -> None:
    """Write tokenizer, token files and manifest to `partial`, from where an earlier call ended."""
    tokenizer, progress = _tokenizer(config, shards, fixed, partial, say)
    vocab_size = vocabulary_size(tokenizer)
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    specification = tokenizer.backend_tokenizer.to_str()
    task = TokeniseShard(
        partial / "shards",
        specification,
        dtype,
        tokenizer.eos_token_id,
        config.validation_fraction,
        fixed,
    )
    files = {name: SplitFiles(partial, name, dtype, progress.splits[name]) for name in SPLITS}
    tokenise_all(config, shards, task, progress, files, say)
    held_out = validation_source(config)
    if held_out:
        say_left_out(progress.splits["validation"], held_out, say)
    of_config = ["train"] if held_out else SPLITS
    say_left_out(sum((progress.splits[name] for name in of_config), Counts()), config, say)
    splits = {}
    for name, counts in progress.splits.items():
        values = asdict(counts) | files[name].close()
        del values["missing"], values["blank"]
        splits[name] = SplitManifest(**values)
    values = {
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "tokenizer_sha256": sha256(partial / "tokenizer" / "tokenizer.json"),
        "tokenizer_bytes": progress.tokenizer_bytes,
        "tokenizer_files": tokenizer_files(partial),
        "tokenizer_loses": progress.tokenizer_loses,
        "settings": _settings(config),
        "splits": splits,
    }
    manifest = Manifest(**values, fingerprint=fingerprint(values))
    write_text(partial / "manifest.json", json.dumps(asdict(manifest), indent=2) + "\n")


def _tokenizer(
    config: DataConfig, shards: SplitShards, fixed: FixedSplits, partial: Path, say: Say
):
    """The tokenizer, saved in `partial`, and how far the preparation is."""
    file = partial / "shards" / PROGRESS_FILE
    if file.is_file():
        progress = Progress.load(file)
        say(f"going on from {progress.shards} of {len(shards)} shards")
        return load_tokenizer(partial), progress  # config.tokenizer may be another one by now
    tokenizer_bytes, loses = 0, ""
    if config.tokenizer == "train":
        # The trainer has threads of its own. Their number is read once, at first use.
        if config.workers:
            os.environ["RAYON_NUM_THREADS"] = str(config.workers)
        tokenizer, tokenizer_bytes = _train(config, shards, fixed, say)
    else:
        tokenizer = existing_tokenizer(config.tokenizer)
        if loses := loss_of_text(tokenizer, training_documents(shards, config, fixed)):
            say(loses)
    tokenizer.save_pretrained(str(partial / "tokenizer"))
    progress = Progress(tokenizer_bytes, loses)
    file.parent.mkdir(exist_ok=True)
    progress.save(file)
    return tokenizer, progress


def _train(config: DataConfig, shards: SplitShards, fixed: FixedSplits, say: Say):
    """Train the BPE on the training documents, or their first SAMPLE_BYTES. Returns it and how many
    bytes it saw.
    """
    began, seen = time.perf_counter(), 0
    documents = training_documents(shards, config, fixed)

    def sample():
        nonlocal seen
        while seen < SAMPLE_BYTES and (text := next(documents, None)) is not None:
            for piece in pieces(text, TRAINING_PIECE):
                seen += len(piece.encode())
                yield piece

    texts = sample()
    tokenizer = train_tokenizer(texts, config.vocab_size)
    is_part = next(texts, None) is not None or next(documents, None) is not None
    part = "the first " if is_part else ""
    too_small = len(tokenizer) < config.vocab_size
    note = f" (the corpus is too small for {config.vocab_size})" if too_small else ""
    say(
        f"tokenizer: {len(tokenizer)} tokens, trained on {part}{seen / 1e6:.1f} MB "
        f"in {time.perf_counter() - began:.1f} s{note}"
    )
    return tokenizer, seen


def _publish(partial: Path, directory: Path) -> None:
    """Give `partial` its name. Raises FileExistsError if the name is taken."""
    shutil.rmtree(partial / "shards", ignore_errors=True)
    flush_tree(partial)
    (partial / IDENTITY_FILE).unlink()  # last: without it, a killed process has to start again
    try:
        publish(partial, directory)
    except OSError as error:
        if directory.exists():
            raise FileExistsError(str(directory)) from error
        raise
