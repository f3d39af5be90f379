"""Tokenises documents in worker processes, and writes the token files in the documents' order."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from mixer.common.files import sha256
from mixer.common.ranks import Say
from mixer.data.corpus import texts_of
from mixer.data.manifest import SPLITS, SplitManifest
from mixer.data.tokenizer import pieces, token_encoder
from mixer.data.workers import results

BATCH_CHARACTERS = 1 << 20  # a batch has at least this many, but for the last one
REPORT_SECONDS = 5.0

Batch = list[tuple[str, str]]  # (split, document) of each


@dataclass
class Tokens:
    """The tokens of one split of a batch, as the token files hold them, and its text's size."""

    ids: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)  # where each document ends, in tokens
    bytes: int = 0
    words: int = 0


@dataclass(frozen=True)
class Tokenise:
    """The task of a worker: the tokens of a batch, for each split."""

    tokenizer: str  # the content of a tokenizer.json
    dtype: str  # of the token files, such as <u2
    eos: int
    are_pairs: bool

    def __call__(self, batch: Batch) -> dict[str, Tokens]:
        splits = {name: Tokens() for name in SPLITS}
        eos = np.array([self.eos], self.dtype).tobytes()
        for split, document in batch:
            tokens = splits[split]
            for text in texts_of(document, self.are_pairs):
                for piece in pieces(text):
                    tokens.ids += self._encode(piece)
                tokens.ids += eos
                tokens.bytes += len(text.encode())
                tokens.words += len(text.split())
            tokens.ends.append(len(tokens.ids) // len(eos))
        return splits

    @cached_property
    def _encode(self) -> Callable[[str], bytes]:
        return token_encoder(self.tokenizer, np.dtype(self.dtype))


def write_tokens(
    documents: Iterable[tuple[str, str]], task: Tokenise, workers: int, directory: Path, say: Say
) -> dict[str, SplitManifest]:
    """Writes the token files of the (split, document) pairs, and returns what each split holds.
    Every few seconds `say` is told how far it is.
    """
    counts = {name: Counter() for name in SPLITS}
    began = said = time.perf_counter()
    with ExitStack() as opened:
        names = [f"{split}.{kind}" for split in SPLITS for kind in ("bin", "docs.bin")]
        files = {name: opened.enter_context(open(directory / name, "wb")) for name in names}
        # closing ends the workers, also where writing fails
        for splits in opened.enter_context(closing(results(task, batches(documents), workers))):
            for name, tokens in splits.items():
                files[f"{name}.bin"].write(tokens.ids)
                ends = np.array([0, *tokens.ends], "<u8")
                files[f"{name}.docs.bin"].write((ends[1:] + counts[name]["tokens"]).tobytes())
                counts[name].update(documents=len(tokens.ends), tokens=int(ends[-1]))
                counts[name].update(bytes=tokens.bytes, words=tokens.words)
            if time.perf_counter() - said > REPORT_SECONDS:
                said = time.perf_counter()
                say(_report(counts, said - began))
    say(_report(counts, time.perf_counter() - began))
    return {name: _recorded(directory, name, count) for name, count in counts.items()}


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


def _report(counts: dict[str, Counter], seconds: float) -> str:
    done = sum(counts.values(), Counter())
    return (
        f"tokenised: {done['documents']} documents ({counts['validation']['documents']} of them "
        f"for validation), {done['bytes'] / 1e6:.1f} MB, {done['tokens'] / 1e6:.2f} M tokens in "
        f"{seconds:.1f} s ({done['bytes'] / seconds / 1e6:.2f} MB/s, "
        f"{done['tokens'] / seconds:.0f} tokens/s)"
    )


def _recorded(directory: Path, split: str, counts: Counter) -> SplitManifest:
    tokens, documents = (sha256(directory / f"{split}.{kind}") for kind in ("bin", "docs.bin"))
    return SplitManifest(**counts, tokens_sha256=tokens, documents_sha256=documents)
