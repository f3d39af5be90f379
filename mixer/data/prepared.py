"""Prepared data: what a directory of it holds, and its splits as samples or pairs of texts.

train.bin         token ids, uint16 (uint32 above 65536 tokens), each document followed by EOS
train.docs.bin    where each document ends in train.bin (uint64, exclusive, EOS included)
validation.bin, validation.docs.bin
tokenizer/        what AutoTokenizer.from_pretrained reads
manifest.json     settings, counts and hashes
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixer.common.errors import Say, UserError, say_on_stderr
from mixer.common.files import has_sha256
from mixer.common.parsing import read_json

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class SplitManifest:
    """Counts of one split: `bytes` (UTF-8) and `words` of the text, `tokens` with EOS."""

    documents: int
    bytes: int
    words: int
    tokens: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a prepared directory holds. `fingerprint` is a hash over all else here."""

    dtype: str
    vocab_size: int
    eos_token_id: int
    tokenizer_sha256: str
    settings: dict
    splits: dict[str, SplitManifest]
    fingerprint: str
    tokenizer_files: dict[str, str] = field(default_factory=dict)  # SHA-256 of each by its name
    tokenizer_loses: str = ""  # of a sample of the text, in words; see tokenizer.loss_of_text

    @classmethod
    def of(cls, values: dict) -> "Manifest":
        """From the values of a manifest.json, with the fingerprint that they should have."""
        splits = {name: _known(SplitManifest, counts) for name, counts in values["splits"].items()}
        return _known(cls, values | {"splits": splits, "fingerprint": fingerprint(values)})

    @classmethod
    def load(cls, directory: str | Path) -> "Manifest":
        """Reads `directory`/manifest.json. Raises UserError if it is missing or damaged."""
        file = Path(directory) / "manifest.json"
        again = f"copy it again, or delete {directory} and prepare again"
        values = read_json(file, again, required={"fingerprint": str})
        if values["fingerprint"] != fingerprint(values):
            raise UserError(f"{file} is not what preparing wrote (another fingerprint): {again}")
        return cls.of(values)

    def verify(
        self, directory: str | Path, splits: Iterable[str] = (), say: Say = say_on_stderr
    ) -> None:
        """Raises UserError unless the files of the tokenizer and of the splits have their recorded
        SHA-256, which is compared once on each machine. `say` is told how far it is.
        """
        directory = Path(directory)
        tokenizer = self.tokenizer_files or {"tokenizer.json": self.tokenizer_sha256}
        recorded = {f"tokenizer/{name}": value for name, value in tokenizer.items()}
        for split in splits:
            recorded[f"{split}.bin"] = self.splits[split].tokens_sha256
            recorded[f"{split}.docs.bin"] = self.splits[split].documents_sha256
        if self.tokenizer_files:  # a file that was added may change what the tokenizer does
            for file in directory.glob("tokenizer/*.json"):
                recorded.setdefault(f"tokenizer/{file.name}", "none")
        for name, value in recorded.items():
            file = directory / name
            if not (file.is_file() and has_sha256(file, value, say)):
                raise UserError(
                    f"{file} is not what preparing wrote (its SHA-256 differs); put that back, or "
                    f"delete {directory} and prepare again"
                )


def _known(kind: type, values: dict) -> Any:
    """An instance of a dataclass; earlier versions wrote more values than it has."""
    return kind(**{item.name: values[item.name] for item in fields(kind) if item.name in values})


def fingerprint(values: dict) -> str:
    """The hash over the values of a manifest.json."""
    known = {name: values[name] for name in values if name not in ("format", "fingerprint")}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


class TokenFile:
    """One split of prepared data as samples of `context` tokens, read from the file when they are
    asked for. Memory grows only by 8 bytes a document, and only where the data is not packed.

    packed (a setting of the data): sample i is tokens[i * context : (i + 1) * context + 1], inputs
    all but its last, targets all but its first. Otherwise: one document a row, padded with EOS; a
    longer document is cut into several rows, so that each of its tokens but the first is a target
    exactly once. With the setting `cut`, a row has the first `context` tokens of a document, and
    the rest of it is not used, nor its EOS.

    Raises UserError if the data is missing, not what its hashes say, or has no sample.
    """

    def __init__(self, directory: str | Path, split: str, context: int, say: Say = say_on_stderr):
        self.path, self.context = Path(directory) / split, context
        self.manifest = Manifest.load(directory)
        self.manifest.verify(directory, [split], say)
        self.counts, self.dtype = self.manifest.splits[split], np.dtype(self.manifest.dtype)
        self.packed = self.manifest.settings["packed"]
        self.cut = self.manifest.settings.get("cut", False)
        self.files = {kind: open(f"{self.path}.{kind}", "rb") for kind in ("bin", "docs.bin")}
        self.samples_before = self._samples_before()
        if not len(self):
            raise UserError(
                f"the {split} split of {directory} has {self.counts.tokens} tokens, and a context "
                f"of {context} needs at least {context + 1} (a pair of passages: a document of "
                f"{2 * context}); choose a shorter context, or more text (for validation, a larger "
                "data.validation_fraction) and another data.directory"
            )

    @cached_property
    def tokens(self) -> np.ndarray:
        """All of the file, memory-mapped."""
        return np.memmap(f"{self.path}.bin", self.dtype, "r")

    def document_ends(self) -> np.ndarray:
        """(documents,) int64: where each document ends in the file, EOS included."""
        return np.fromfile(f"{self.path}.docs.bin", "<i8")

    def _samples_before(self) -> np.ndarray:
        """(documents + 1,): the samples before each document, and all. Packed text is one."""
        if self.packed:
            return np.array([0, (self.counts.tokens - 1) // self.context])
        targets = np.diff(self.document_ends(), prepend=0) - 1
        rows = targets > 1 if self.cut else -(-targets // self.context)
        return np.concatenate([[0], np.cumsum(rows)])

    def __len__(self) -> int:
        return int(self.samples_before[-1])

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples `indices`, each int64 (batch, context); padding has
        target -100.
        """
        rows = np.full((len(indices), self.context + 1), self.manifest.eos_token_id, dtype=np.int64)
        ignored = np.zeros((len(indices), self.context), dtype=bool)
        for row, index in enumerate(indices):
            start, end = self.span(int(index))
            rows[row, : end - start] = self.read(start, end)
            ignored[row, end - start - 1 :] = True
        rows = torch.from_numpy(rows)  # (batch, context + 1)
        targets = rows[:, 1:].masked_fill(torch.from_numpy(ignored), -100)
        return rows[:, :-1].contiguous(), targets

    def span(self, index: int) -> tuple[int, int]:
        """Where sample `index` starts and ends in the file; at most context + 1 tokens."""
        begin, end, number = self.document_of(index)
        start = begin + number * self.context
        return start, min(start + self.context + (not self.cut), end - self.cut)

    def document_of(self, index: int) -> tuple[int, int, int]:
        """Where a sample's document starts and ends (with EOS), and which of its samples it is."""
        document = int(np.searchsorted(self.samples_before, index, side="right")) - 1
        number = index - int(self.samples_before[document])
        if len(self.samples_before) == 2:  # packed, or indeed one document
            return 0, self.counts.tokens, number
        ends = self._read("docs.bin", np.dtype("<u8"), max(document - 1, 0), document + 1)
        return int(ends[0]) if document else 0, int(ends[-1]), number

    def read(self, start: int, end: int) -> np.ndarray:
        """Tokens [start, end)."""
        return self._read("bin", self.dtype, start, end)

    def _read(self, kind: str, dtype: np.dtype, start: int, end: int) -> np.ndarray:
        """Not through a memory map, whose pages would count as this process's memory."""
        size, file = dtype.itemsize, self.files[kind].fileno()
        return np.frombuffer(os.pread(file, (end - start) * size, start * size), dtype)


class PairFile(TokenFile):
    """One split of prepared data as pairs of texts of at most `context` tokens each.

    Prepared with data.pair_field, a document is a pair: query, EOS, target, EOS. Others are cut
    into passages of `context` tokens, of which the first and second are a pair, the third and
    fourth, and so on; the rest at the end of a document is in none.
    """

    def _samples_before(self) -> np.ndarray:
        sizes = np.diff(self.document_ends(), prepend=0) - 1  # without EOS
        self.are_rows = "pair_field" in self.manifest.settings
        pairs = np.ones_like(sizes) if self.are_rows else sizes // (2 * self.context)
        return np.concatenate([[0], np.cumsum(pairs)])

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The queries and the targets of the pairs `indices`, each int64 (batch, context), with
        -100 behind the end of a text.
        """
        texts = np.full((2, len(indices), self.context), -100)
        for row, index in enumerate(indices):
            for side, tokens in enumerate(self._pair(int(index))):
                tokens = tokens[: self.context]
                texts[side, row, : len(tokens)] = tokens
        return torch.from_numpy(texts[0]), torch.from_numpy(texts[1])

    def _pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start, end, number = self.document_of(index)
        if self.are_rows:
            tokens = self.read(start, end - 1)
            middle = int((tokens == self.manifest.eos_token_id).argmax())
            return tokens[:middle], tokens[middle + 1 :]
        start += 2 * self.context * number
        tokens = self.read(start, start + 2 * self.context)
        return tokens[: self.context], tokens[self.context :]
