"""Tokenises documents in worker processes, and writes the token files in the documents' order."""

import gc
import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from mixer.common.errors import Say, UserError, end_with_parent
from mixer.common.files import sha256
from mixer.data.corpus import SPLITS, texts_of
from mixer.data.tokenizer import pieces, token_encoder

BATCH_CHARACTERS = 1 << 20  # a batch has at least this many, but for the last one
REPORT_SECONDS = 5.0

Batch = list[tuple[str, str]]  # (split, document) of each


@dataclass
class Tokens:
    """The tokens of one split of a batch, as the token files hold them."""

    ids: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)  # where each document ends, in tokens
    counts: Counter = field(default_factory=Counter)  # as in a SplitManifest


Encode = Callable[[Batch], dict[str, Tokens]]  # the tokens of a batch, for each split


def batch_encoder(tokenizer: PreTrainedTokenizerFast, dtype: str, are_pairs: bool) -> Encode:
    """dtype: that of the token files. A document is followed by EOS, and each text of a pair is."""
    encode = token_encoder(tokenizer.backend_tokenizer.to_str(), np.dtype(dtype))
    eos = np.array([tokenizer.eos_token_id], dtype).tobytes()

    def encode_batch(batch: Batch) -> dict[str, Tokens]:
        splits = {name: Tokens() for name in SPLITS}
        for split, document in batch:
            tokens = splits[split]
            for text in texts_of(document, are_pairs):
                for piece in pieces(text):
                    tokens.ids += encode(piece)
                tokens.ids += eos
                tokens.counts.update(bytes=len(text.encode()), words=len(text.split()))
            tokens.ends.append(len(tokens.ids) // len(eos))
        for tokens in splits.values():
            tokens.counts.update(documents=len(tokens.ends), tokens=len(tokens.ids) // len(eos))
        return splits

    return encode_batch


def write_tokens(
    documents: Iterable[tuple[str, str]], encode: Encode, workers: int, directory: Path, say: Say
) -> dict[str, dict[str, Any]]:
    """Writes the token files of the (split, document) pairs, and returns what the manifest says of
    each split. Every few seconds `say` is told how far it is.
    """
    counts = {name: Counter() for name in SPLITS}
    began = said = time.perf_counter()
    with ExitStack() as opened:
        names = [f"{split}.{kind}" for split in SPLITS for kind in ("bin", "docs.bin")]
        files = {name: opened.enter_context(open(directory / name, "wb")) for name in names}
        # closing ends the workers, also where writing fails
        for splits in opened.enter_context(closing(results(encode, batches(documents), workers))):
            for name, tokens in splits.items():
                files[f"{name}.bin"].write(tokens.ids)
                ends = np.array(tokens.ends, "<u8") + counts[name]["tokens"]
                files[f"{name}.docs.bin"].write(ends.tobytes())
                counts[name].update(tokens.counts)
            if time.perf_counter() - said > REPORT_SECONDS:
                said = time.perf_counter()
                say(_report("tokenised so far", counts, said - began))
    say(_report("tokenised", counts, time.perf_counter() - began))
    for name, count in counts.items():
        count["tokens_sha256"] = sha256(directory / f"{name}.bin")
        count["documents_sha256"] = sha256(directory / f"{name}.docs.bin")
    return {name: dict(count) for name, count in counts.items()}


def batches(documents: Iterable[tuple[str, str]]) -> Iterator[Batch]:
    batch, size = [], 0
    for split, document in documents:
        batch.append((split, document))
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _report(what: str, counts: dict[str, Counter], seconds: float) -> str:
    done = sum(counts.values(), Counter())
    return (
        f"{what}: {done['documents']:,} documents ({counts['validation']['documents']:,} of them "
        f"for validation), {done['bytes'] / 1e6:.1f} MB, {done['tokens'] / 1e6:.2f} M tokens in "
        f"{seconds:.1f} s ({done['bytes'] / seconds / 1e6:.2f} MB/s, "
        f"{done['tokens'] / seconds:,.0f} tokens/s)"
    )


# --- workers -----------------------------------------------------------------


def results(task: Callable, jobs: Iterable, most: int) -> Iterator:
    """`task(job)` of each job, in the order of the jobs, computed by `most` processes (0: one for
    each core), each of which takes the next job when it is free. With one, there is no other.

    At most 2 * `most` jobs are held at a time; jobs and results are pickled. An exception of the
    task is raised here. Raises UserError if a worker is killed. The workers end when the generator
    does, or this process, however that ends.
    """
    most = most or available_cores()
    if most == 1:
        yield from map(task, jobs)
        return
    # Forks start at once. They use no GPU, and none of the tokenizer's threads: neither survives a
    # fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("fork")
    pool, given = ProcessPoolExecutor(most, context, _begin_worker, (task,)), deque()
    try:
        for job in jobs:
            given.append(pool.submit(_do, job))
            if len(given) == 2 * most:
                yield given.popleft().result()
        while given:
            yield given.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed; if memory is short, set a smaller data.workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
