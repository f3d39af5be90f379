"""The data of a run: both splits as samples, with their tokenizer. A text is prepared once:
documents become token files, a tokenizer and a manifest.

A directory of prepared data appears when it is complete, so a process that is killed leaves nothing
that could be taken for prepared data.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from mixer.common.errors import Say, UserError
from mixer.common.files import STAGE, sha256, whole_directory
from mixer.data.batches import Samples
from mixer.data.config import TASKS, DataConfig, check, unused_options, without_unused
from mixer.data.corpus import SPLITS, Corpus
from mixer.data.prepared import Manifest, PairFile, TokenFile
from mixer.data.tasks import open_task
from mixer.data.tokenise import batch_encoder, write_tokens
from mixer.data.tokenizer import (
    existing_tokenizer,
    load_tokenizer,
    loss_of_text,
    token_bytes,
    train_tokenizer,
    training_sample,
    vocabulary_size,
)

NOT_COMPARED = ("directory", "workers")  # settings that do not change what is written
# Settings that data prepared by earlier versions does not have. They are recorded only where they
# are set, so that such data, and checkpoints trained on it, still match.
ADDED_LATER = (
    *("validation_path", "validation_split", "validation_documents"),
    *("cut", "pairs", "pair_field"),
)


@dataclass
class Data:
    """Prepared data, or a task."""

    manifest: Manifest
    training: Samples
    validation: Samples
    tokenizer: PreTrainedTokenizerFast
    token_bytes: np.ndarray  # (vocabulary,): of the text that each token stands for


def open_data(config: DataConfig, context: int, as_pairs: bool = False, say: Say = print) -> Data:
    """The data as samples of `context` tokens, or pairs of texts of at most so many. A text is
    prepared unless that was done already: whichever process does it prints how far it is.
    """
    if config.source in TASKS:
        manifest, splits, tokenizer = open_task(config, context)
    else:
        manifest, tokenizer = prepare(config), load_tokenizer(config.directory)
        if manifest.tokenizer_loses:
            say(manifest.tokenizer_loses)
        kind = PairFile if as_pairs else TokenFile
        splits = [kind(config.directory, split, context, say) for split in SPLITS]
    # Both are saved with the model, for tools that cut texts and make batches of them.
    tokenizer.model_max_length = context
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return Data(manifest, *splits, tokenizer, token_bytes(tokenizer))


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
        return manifest
    with whole_directory(Path(config.directory).absolute()) as stage:
        return _existing(config) or _write(config, stage, say)


def _existing(config: DataConfig) -> Manifest | None:
    """The manifest of `config.directory` if it holds data of these settings; None if there is
    nothing there.
    """
    directory = Path(config.directory)
    if not (directory / "manifest.json").is_file():
        others = (file for file in directory.glob("*") if not file.name.startswith(STAGE))
        if directory.is_file() or any(others):
            raise UserError(
                f"data.directory {directory} exists and holds other files, no prepared data; "
                "choose another data.directory"
            )
        return None
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
    corpus = Corpus.open(config)
    tokenizer, loses = _tokenizer(config, corpus, say)
    tokenizer.save_pretrained(str(directory / "tokenizer"))
    tokenizer = load_tokenizer(directory)  # as training reads it
    hashes = {file.name: sha256(file) for file in sorted(directory.glob("tokenizer/*.json"))}
    vocab_size = vocabulary_size(tokenizer)
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    encode = batch_encoder(tokenizer, dtype, bool(config.pair_field))
    values = {
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "tokenizer_sha256": hashes["tokenizer.json"],
        "tokenizer_files": hashes,
        "tokenizer_loses": loses,
        "settings": _settings(config),
        "splits": write_tokens(corpus.documents(say), encode, config.workers, directory, say),
    }
    manifest = Manifest.of(values)
    (directory / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def _tokenizer(config: DataConfig, corpus: Corpus, say: Say) -> tuple[PreTrainedTokenizerFast, str]:
    """The tokenizer, and what it loses of the text."""
    if config.tokenizer != "train":
        tokenizer = existing_tokenizer(config.tokenizer)
        return tokenizer, loss_of_text(tokenizer, corpus.training_texts())
    began = time.perf_counter()
    tokenizer = train_tokenizer(training_sample(corpus.training_texts()), config.vocab_size)
    say(
        f"tokenizer: {len(tokenizer)} tokens (data.vocab_size = {config.vocab_size}) in "
        f"{time.perf_counter() - began:.1f} s"
    )
    return tokenizer, ""
