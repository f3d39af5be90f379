"""The data of a run: both splits as samples, with their tokenizer. It is prepared once: documents
become token files, a tokenizer and a manifest.

A directory of prepared data appears when it is complete, so a process that is killed leaves nothing
that could be taken for prepared data. It holds

train.bin         token ids, uint16 (uint32 above 65536 tokens), each document followed by EOS
train.docs.bin    where each document ends in train.bin (uint64, exclusive, EOS included); of a
                  pair, where its query does, and where its target does
validation.bin, validation.docs.bin
tokenizer/        what AutoTokenizer.from_pretrained reads
manifest.json     settings, counts and hashes
"""

import gc
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from mixer.common import progress
from mixer.common.errors import Say, UserError, end_with_parent
from mixer.common.files import as_path, sha256, whole_directory
from mixer.common.terminal import counted
from mixer.data import tokenizer as tokenizing
from mixer.data.config import SPLITS, DataConfig, Manifest, existing_data, manifest_settings
from mixer.data.samples import Samples, TokenFile
from mixer.data.sources import Shard, documents, source_shards, text_hash, texts_of

BATCH_CHARACTERS = 1 << 20  # that a worker gets at a time, and the rest of their last piece
LEAST_HELD_OUT = 10_000  # characters of a single document, unless these are above a tenth of it


@dataclass
class Data:
    """Both splits as samples, with what they are made of."""

    manifest: Manifest
    training: Samples
    validation: Samples
    tokenizer: PreTrainedTokenizerFast
    text_bytes: tokenizing.TextBytes | None = None  # of validation's text; a task has none


def open_data(
    config: DataConfig, context: int, sample_class: type[TokenFile] = TokenFile, say: Say = print
) -> Data:
    """The data as samples of a class, for a context. It is prepared unless that was done already:
    whichever process does it prints how far it is.
    """
    manifest = prepare(config)
    directory = as_path(config.directory)
    tokenizer = tokenizing.load_tokenizer(directory)
    if manifest.tokenizer_loses:
        say(manifest.tokenizer_loses)
    training, validation = (sample_class(directory, split, context) for split in SPLITS)
    size = manifest.splits["validation"].bytes
    text_bytes = tokenizing.TextBytes(tokenizer, [validation.all_tokens()], size)
    tokenizing.fit_to_models(tokenizer, context)
    return Data(manifest, training, validation, tokenizer, text_bytes)


def prepare(config: DataConfig, say: Say = print) -> Manifest:
    """Tokenize the corpus of `config` into `config.directory`, unless that was done already, and
    return its manifest. Of several processes one works, and the others wait and find it done.

    Files of the source that change later are not noticed. Raises UserError for a source that cannot
    be used, and for a directory that holds anything else; a refusal leaves nothing behind.
    """
    # Prepared data can be used where nothing can be written, so it takes no lock.
    if (manifest := existing_data(config)) is not None:
        return manifest
    with whole_directory(as_path(config.directory).absolute()) as stage:
        return existing_data(config) or _write(config, stage, say)


def _write(config: DataConfig, directory: Path, say: Say) -> Manifest:
    """Write tokenizer, token files and manifest."""
    are_pairs = bool(config.pair_field)
    with progress.time_reported("reading the text", say):
        corpus = Corpus(config)
    training = (document for split, document in corpus.documents() if split == "train")
    texts = itertools.chain.from_iterable(texts_of(document, are_pairs) for document in training)
    if config.tokenizer == "train":
        with progress.time_reported("training the tokenizer", say):
            sample = tokenizing.training_sample(texts)
            tokenizer = tokenizing.train_tokenizer(sample, config.vocab_size)
        loses = ""
        say(f"tokenizer: {len(tokenizer)} tokens")
    else:
        with progress.time_reported("reading the tokenizer, and a sample of the text", say):
            tokenizer = tokenizing.existing_tokenizer(config.tokenizer)
            loses = tokenizing.lost_text(tokenizer, texts)
    if tokenizer.num_special_tokens_to_add(pair=False):
        # Saved with the model, the BOS or EOS would give other tools other tokens than training's.
        tokenizer.backend_tokenizer.post_processor = None
    tokenizer.save_pretrained(str(directory / "tokenizer"))
    tokenizer = tokenizing.load_tokenizer(directory)  # as training reads it
    hashes = {file.name: sha256(file) for file in sorted(directory.glob("tokenizer/*.json"))}
    vocab_size = tokenizing.vocabulary_size(tokenizer)
    dtype = np.dtype("uint16" if vocab_size <= 1 << 16 else "uint32")
    encode = _encoder(tokenizer, dtype)
    batches = _batches(corpus.documents(say), are_pairs)
    values = {
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "tokenizer_sha256": hashes["tokenizer.json"],
        "tokenizer_files": hashes,
        "tokenizer_loses": loses,
        "settings": manifest_settings(config),
        "splits": _write_tokens(batches, encode, config.workers, directory, say),
    }
    manifest = Manifest.of(values)
    (directory / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


class Corpus:
    """What is prepared: a text of which some documents are held out, or a text for each split.

    Raises UserError for what cannot be read, a file of both splits, and an empty split.
    """

    def __init__(self, config: DataConfig):
        self.config = config
        self.training = source_shards(config)
        self.validation: list[Shard] = []  # empty where it is held out of the training text
        if config.validation_path or config.validation_split:
            validation = replace(
                config,
                path=config.validation_path or config.path,
                split=config.validation_split or config.split,
                max_documents=0,
            )
            self.validation = source_shards(validation)
        # All links to a file have its inode and device in common.
        held_out = {shard.file.stat()[1:3] for shard in self.validation if shard.file}
        for shard in self.training:
            if shard.file and shard.file.stat()[1:3] in held_out:
                problem = f"{shard.file} belongs to both data.path and data.validation_path"
                raise UserError(f"{problem}: name different files in one of them")
        self.copies_of_only_document = 0  # of which the end is held out
        documents_of_splits = self.documents()
        first_split, document = next(documents_of_splits)
        if all(split == first_split for split, _ in documents_of_splits):
            text = config.path or f"the text of data.source={config.source}"
            if first_split == "validation":
                setting = f"data.validation_documents = {config.validation_documents}"
                raise UserError(f"{setting} leaves no document of {text} for training: lower it")
            if config.pair_field or len(document) < 2:
                problem = f"{text} has 1 document (copies count once), and validation needs another"
                remedy = "add files, or give data.validation_path (hub: data.validation_split)"
                raise UserError(f"{problem}: {remedy}")
            self.copies_of_only_document = sum(1 for _ in self.documents())

    def documents(self, say: Say = lambda line: None) -> Iterator[tuple[str, str]]:
        """(split, document) of all documents, in order. Says how many rows have no text, and how
        many training documents are copies of validation documents.

        A share is held out by a hash of the text, so a document keeps its split when the corpus
        grows or is reordered, and copies land in the same split. Neither split is empty: the first
        document is for training, and the next that is no copy of it for validation. If there is
        only one, the end of it is held out, and said.
        """
        if self.copies_of_only_document:
            (text,) = deque(documents(self.training, self.config, say=say), maxlen=1)
            start = start_of_end(text, self.config.validation_fraction)
            share = f"{len(text) - start:,} of its {len(text):,} characters"
            copies = self.copies_of_only_document
            number = f"there are {copies:,} copies of one" if copies > 1 else "there is one"
            say(f"{number} document: its end is for validation, {share}")
            yield "train", text[:start]
            yield "validation", text[start:]
            return
        validation_hashes: set[int] = set()
        if self.validation:
            for text in documents(self.validation, self.validation[0].config, say=say):
                validation_hashes.add(text_hash(text))
                yield "validation", text
        first = first_held_out = None
        copies = 0
        for number, text in enumerate(documents(self.training, self.config, say=say)):
            if self.validation:
                is_held_out = False
            elif self.config.validation_documents:
                is_held_out = number < self.config.validation_documents
                if is_held_out:
                    validation_hashes.add(text_hash(text))
            elif first is None or text == first:
                first = text
                is_held_out = False
            elif first_held_out is None or text == first_held_out:
                first_held_out = text
                is_held_out = True
            else:
                is_held_out = text_hash(text) < self.config.validation_fraction * 2**64
            if validation_hashes and not is_held_out:
                copies += text_hash(text) in validation_hashes
            yield ("validation" if is_held_out else "train"), text
        if copies:
            among = "among the validation documents too, so the validation loss will be too low"
            say(f"{counted(copies, 'training document')} {among}: remove copies from either text")


def start_of_end(text: str, share: float) -> int:
    """Where the end of a text starts that is held out: a share of it, or, of a short text, up to a
    tenth, to have some samples. If there is a line's end nearby, it starts behind that.
    """
    size = max(1, int(share * len(text)), min(len(text) // 10, LEAST_HELD_OUT))
    start = len(text) - size
    return text.rfind("\n", max(1, start - size), start) + 1 or start


class Piece(NamedTuple):
    """A stretch of a text that is tokenized at a time, so that a huge text becomes several jobs."""

    split: str
    before: str  # the text's last character before it; "" where it is the first
    text: str
    closes: str  # "text" where it is the last, "document" also of the document, else ""


def _write_tokens(
    batches: Iterable[list[Piece]], encode: Callable, workers: int, directory: Path, say: Say
) -> dict[str, dict[str, int | str]]:
    """Writes the token files, and returns what the manifest says of each split."""
    counts = {name: Counter() for name in SPLITS}
    began = reported = time.perf_counter()
    with ExitStack() as opened:
        names = [f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "docs.bin")]
        files = {name: opened.enter_context(open(directory / name, "wb")) for name in names}
        # closing ends the workers, also where writing fails
        encoded = opened.enter_context(closing(parallel_map(encode, batches, workers)))
        for split, closes, tokens, piece_counts in itertools.chain.from_iterable(encoded):
            counts[split].update(piece_counts)
            files[f"{split}.bin"].write(tokens)
            if closes:
                files[f"{split}.docs.bin"].write(counts[split]["tokens"].to_bytes(8, "little"))
            if time.perf_counter() - reported > progress.SECONDS:
                reported = time.perf_counter()
                say(_report("tokenized so far", counts, reported - began))
    say(_report("tokenized", counts, time.perf_counter() - began))
    training, validation = (counts[split]["tokens"] for split in SPLITS)
    if validation > training:
        say(
            f"validation has {validation:,} tokens, and training {training:,}: for another split, "
            "add text or give another data.validation_path, with another data.directory"
        )
    with progress.time_reported("hashing the token files", say):
        return {
            split: {
                **counts[split],
                "tokens_sha256": sha256(directory / f"{split}.bin"),
                "documents_sha256": sha256(directory / f"{split}.docs.bin"),
            }
            for split in SPLITS
        }


def _report(activity: str, counts: dict[str, Counter], seconds: float) -> str:
    total = sum(counts.values(), Counter())
    held_out = counts["validation"]["documents"]
    return (
        f"{activity}: {counted(total['documents'], 'document')} ({held_out:,} of them "
        f"for validation), {total['bytes'] / 1e6:.1f} MB, {total['tokens'] / 1e6:.2f} M tokens in "
        f"{seconds:.1f} s ({total['bytes'] / seconds / 1e6:.2f} MB/s)"
    )


def _batches(documents: Iterable[tuple[str, str]], are_pairs: bool) -> Iterator[list[Piece]]:
    """The pieces of all documents, BATCH_CHARACTERS or the next few more at a time."""
    batch = []
    characters = 0
    for split, document in documents:
        texts = texts_of(document, are_pairs)
        for number, text in enumerate(texts, 1):
            text_closes = "document" if number == len(texts) else "text"
            for start, piece in tokenizing.pieces(text):
                closes = text_closes if start + len(piece) == len(text) else ""
                batch.append(Piece(split, text[max(start - 1, 0) : start], piece, closes))
                characters += len(piece)
                if characters >= BATCH_CHARACTERS:
                    yield batch
                    batch = []
                    characters = 0
    yield batch


def _encoder(
    tokenizer: PreTrainedTokenizerFast, dtype: np.dtype
) -> Callable[[list[Piece]], list[tuple[str, str, bytes, dict[str, int]]]]:
    """A function from a batch to (split, what it closes, tokens, counts) of each piece. EOS ends
    each text.
    """
    encode = tokenizing.text_encoder(tokenizer)
    eos = np.array([tokenizer.eos_token_id], dtype).tobytes()

    def encode_piece(piece: Piece) -> tuple[str, str, bytes, dict[str, int]]:
        tokens = encode(piece.text, is_later=bool(piece.before)).astype(dtype).tobytes()
        if piece.closes:
            tokens += eos
        words = len(piece.text.split())
        if piece.before.strip() and piece.text[:1].strip():
            words -= 1  # the first one begins in the piece before
        counts = {
            "documents": int(piece.closes == "document"),
            "words": words,
            "bytes": len(piece.text.encode()),
            "tokens": len(tokens) // len(eos),
        }
        return piece.split, piece.closes, tokens, counts

    return lambda batch: [encode_piece(piece) for piece in batch]


def parallel_map(task: Callable, jobs: Iterable, workers: int) -> Generator[Any, None, None]:
    """`task(job)` of each job, in their order, computed by so many processes (0: one for each core;
    1: this one). At most two jobs a worker are held at a time.

    Raises what the task raises, and UserError if a worker is killed. The workers end when the
    generator does, or this process, however that ends.
    """
    if not workers:
        has_affinity = hasattr(os, "sched_getaffinity")
        workers = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if workers == 1:
        yield from map(task, jobs)
        return
    # Forks start at once. They use no GPU and no threads of the tokenizer, which no fork inherits.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (task,))
    submitted = deque()
    try:
        for job in jobs:
            submitted.append(pool.submit(_do, job))
            if len(submitted) == 2 * workers:
                yield submitted.popleft().result()
        while submitted:
            yield submitted.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed; if memory is short, set a smaller data.workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(task: Callable) -> None:
    global _task
    _task = task
    gc.freeze()  # it would look through all that this process has inherited, and copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()


def _do(job: object) -> object:
    return _task(job)
