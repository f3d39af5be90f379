"""Prepares data, once: documents become token files, a tokenizer and a manifest.

A directory of prepared data appears when it is complete, so a process that is killed leaves nothing
that could be taken for prepared data.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mixer.common.errors import UserError
from mixer.common.files import STAGE, sha256, whole_directory
from mixer.common.ranks import Say
from mixer.data.config import DataConfig, check, unused_options, without_unused
from mixer.data.corpus import Corpus
from mixer.data.manifest import Manifest, fingerprint, tokenizer_files
from mixer.data.tokenise import Tokenise, write_tokens
from mixer.data.tokenizer import (
    existing_tokenizer,
    load_tokenizer,
    loss_of_text,
    train_tokenizer,
    training_sample,
    vocabulary_size,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NOT_COMPARED = ("directory", "workers")  # settings that do not change what is written
# Settings that data prepared by earlier versions does not have. They are recorded only where they
# are set, so that such data, and checkpoints trained on it, still match.
ADDED_LATER = (
    *("validation_path", "validation_split", "validation_documents"),
    *("cut", "pairs", "pair_field"),
)


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
    # Prepared data can be used where nothing can be written, so it takes no lock.
    if (manifest := _existing(config)) is not None:
        if manifest.tokenizer_loses:
            say(manifest.tokenizer_loses)
        return manifest
    try:
        with whole_directory(Path(config.directory).absolute()) as stage:
            return _existing(config) or _write(config, stage, say)
    except UserError:
        # Where locks do not reach across machines, another one may have been first.
        if (manifest := _existing(config)) is None:
            raise
        return manifest


def _existing(config: DataConfig) -> Manifest | None:
    """The manifest of `config.directory` if it holds data of these settings; None if there is
    nothing there.
    """
    directory = Path(config.directory)
    if not directory.exists() or (
        directory.is_dir() and all(file.name.startswith(STAGE) for file in directory.iterdir())
    ):
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


def _write(config: DataConfig, directory: Path, say: Say) -> Manifest:
    """Write tokenizer, token files and manifest."""
    corpus = Corpus.open(config, say)
    tokenizer, loses = _tokenizer(config, corpus, say)
    tokenizer.save_pretrained(str(directory / "tokenizer"))
    tokenizer = load_tokenizer(directory)  # as training reads it
    vocab_size, eos = vocabulary_size(tokenizer), tokenizer.eos_token_id
    dtype, file_type = ("uint16", "<u2") if vocab_size <= 1 << 16 else ("uint32", "<u4")
    task = Tokenise(tokenizer.backend_tokenizer.to_str(), file_type, eos, bool(config.pair_field))
    values = {
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_token_id": eos,
        "tokenizer_sha256": sha256(directory / "tokenizer" / "tokenizer.json"),
        "tokenizer_files": tokenizer_files(directory),
        "tokenizer_loses": loses,
        "settings": _settings(config),
        "splits": write_tokens(corpus.documents(say), task, config.workers, directory, say),
    }
    manifest = Manifest(**values, fingerprint=fingerprint(values))
    (directory / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def _tokenizer(
    config: DataConfig, corpus: Corpus, say: Say
) -> tuple["PreTrainedTokenizerFast", str]:
    """The tokenizer, and what it loses of the text."""
    if config.tokenizer != "train":
        tokenizer = existing_tokenizer(config.tokenizer)
        if loses := loss_of_text(tokenizer, corpus.training_texts()):
            say(loses)
        return tokenizer, loses
    began = time.perf_counter()
    tokenizer = train_tokenizer(training_sample(corpus.training_texts()), config.vocab_size)
    say(
        f"tokenizer: {len(tokenizer)} tokens (data.vocab_size = {config.vocab_size}) in "
        f"{time.perf_counter() - began:.1f} s"
    )
    return tokenizer, ""
