"""Tokenises one shard of the source, in a worker: tokens and document ends go to a directory of the
shard's own.
"""

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mixer.common.json_file import read_json
from mixer.data.corpus import FixedSplits, shard_documents, split_of
from mixer.data.manifest import SPLITS
from mixer.data.sources import Shard
from mixer.data.tokenizer import pieces, token_encoder

UPDATE_SECONDS = 0.5
IS_DELETED = "what was left of the preparation is deleted; give the same command again"


@dataclass
class Counts:
    """Of the documents of one split: in all, or in one shard. missing, blank: of texts that are
    left out (see `shard_documents`); where both splits have one source, all are of `train`.
    """

    missing: int = 0
    blank: int = 0
    documents: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0
    max_token_id: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        sums = [getattr(self, name) + getattr(other, name) for name in list(asdict(self))[:-1]]
        return Counts(*sums, max(self.max_token_id, other.max_token_id))


@dataclass(frozen=True)
class Job:
    """A shard to tokenise. split: of all its documents; "" if each has its own (`split_of`). limit:
    of documents.
    """

    number: int
    split: str
    shard: Shard
    limit: int | None


@dataclass(frozen=True)
class TokeniseShard:
    """The task of a worker: write the tokens and document ends of a shard to a directory, which
    gets its name when it is complete.
    """

    directory: Path
    specification: str  # of the tokenizer
    dtype: str
    eos: int
    validation_fraction: float
    fixed: FixedSplits

    def place(self, job: Job) -> Path:
        return self.directory / f"{job.number:06d}"

    @cached_property
    def encode(self) -> Callable[[str], bytes]:
        return token_encoder(self.specification, np.dtype(self.dtype).newbyteorder("<"))

    def __call__(self, job: Job, send_update: Callable) -> dict[str, Counts]:
        """The counts of each split. `send_update` gets (documents, bytes, tokens), those since the
        last time.
        """
        final = self.place(job)
        if final.is_dir():  # finished before a kill
            values = read_json(final / "counts.json", IS_DELETED)
            counts = {name: Counts(**value) for name, value in values.items()}
            send_update(totals(counts.values()))
            return counts
        partial = final.with_name(final.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        writers = {name: _ShardWriter(partial, name, self) for name in SPLITS}
        counts = {name: writer.counts for name, writer in writers.items()}
        sent, sent_at = (0, 0, 0), time.perf_counter()
        for split, text in self._documents(job, counts[job.split or "train"]):
            writers[split].add(text)
            if time.perf_counter() - sent_at > UPDATE_SECONDS:
                now = totals(counts.values())
                send_update(tuple(np.subtract(now, sent).tolist()))
                sent, sent_at = now, time.perf_counter()
        send_update(tuple(np.subtract(totals(counts.values()), sent).tolist()))
        for writer in writers.values():
            writer.close()
        values = {name: asdict(count) for name, count in counts.items()}
        (partial / "counts.json").write_text(json.dumps(values))
        os.rename(partial, final)
        return counts

    def _documents(self, job: Job, left_out: Counts) -> Iterator[tuple[str, str]]:
        texts = itertools.islice(shard_documents(job.shard, left_out), job.limit)
        for text in texts:
            yield job.split or split_of(text, self.validation_fraction, self.fixed), text


def totals(counts: Iterable[Counts]) -> tuple[int, int, int]:
    """Documents, bytes and tokens in all."""
    sums = sum(counts, Counts())
    return sums.documents, sums.bytes, sums.tokens


class _ShardWriter:
    """Writes one split of a shard as a stream."""

    def __init__(self, directory: Path, name: str, task: TokeniseShard):
        self.encode, self.dtype = task.encode, np.dtype(task.dtype).newbyteorder("<")
        self.eos = np.array([task.eos], self.dtype).tobytes()
        self.counts = Counts()
        self.tokens = open(directory / f"{name}.bin", "wb")
        self.ends = open(directory / f"{name}.docs.bin", "wb")

    def add(self, text: str) -> None:
        counts = self.counts
        for piece in pieces(text):
            self._append(self.encode(piece))
        self._append(self.eos)
        self.ends.write(np.array([counts.tokens], dtype="<u8").tobytes())
        counts.documents += 1
        counts.bytes += len(text.encode())
        counts.words += len(text.split())

    def _append(self, data: bytes) -> None:
        tokens = np.frombuffer(data, self.dtype)
        self.tokens.write(data)
        self.counts.tokens += len(tokens)
        self.counts.max_token_id = max(self.counts.max_token_id, int(tokens.max(initial=0)))

    def close(self) -> None:
        self.tokens.close()
        self.ends.close()
