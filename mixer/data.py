"""Prepared data as batches: one split's memory-mapped token file, and the order in which its samples are used.

This is also the door to the whole data part: `prepare` makes the files (prepare.py), from documents (corpus.py), with a
tokenizer (tokenizer.py), and says what they hold (manifest.py).
"""

from pathlib import Path

import numpy as np
import torch

from mixer.corpus import DataConfig
from mixer.errors import UserError
from mixer.manifest import SPLITS, Manifest, SplitManifest
from mixer.prepare import prepare
from mixer.tokenizer import load_tokenizer

__all__ = ["DataConfig", "Manifest", "SampleOrder", "SplitManifest", "TokenFile", "load_tokenizer", "prepare"]


class TokenFile:
    """One split of prepared data as samples of `context` tokens, memory-mapped. `len()` is the number of samples.

    Packed (the setting the data was prepared with): sample i is tokens[i * context : (i + 1) * context + 1], inputs all
    but its last, targets all but its first; so every token but the first of the file is a target once, except for a
    rest shorter than the context at the very end. Otherwise: one document a row, padded with EOS; a longer document is
    cut into several rows, so that each of its tokens but the first is a target exactly once, and rows never mix
    documents.

    Raises UserError if the data is missing, cut short, made by another tokenizer than the one beside it, holds ids
    beyond its vocabulary, or is shorter than one sample.
    """

    def __init__(self, directory: str | Path, split: str, context: int):
        if split not in SPLITS:
            raise UserError(f"there is no split {split!r}; allowed: {', '.join(SPLITS)}")
        if context < 1:
            raise UserError(f"the context is {context} tokens; allowed: 1 or more")
        self.directory, self.split, self.context = Path(directory), split, context
        self.manifest = Manifest.load(directory)
        self.manifest.verify(directory)
        counts = self.manifest.splits[split]
        if counts.max_token_id >= self.manifest.vocab_size:
            raise UserError(
                f"{self.directory / split}.bin holds token id {counts.max_token_id}, beyond its vocabulary of "
                f"{self.manifest.vocab_size}; delete {directory} and prepare again"
            )
        if not counts.documents:
            raise UserError(f"{directory} holds no {split} documents; prepare it with data.validation_fraction above 0")
        self.packed = self.manifest.settings["packed"]
        self.tokens = np.memmap(self.directory / f"{split}.bin", np.dtype(self.manifest.dtype).newbyteorder("<"), "r")
        self.row_ends = None if self.packed else self._row_ends(counts.documents)
        self.samples = (counts.tokens - 1) // context if self.packed else int(self.row_ends[-1])
        if self.samples < 1:
            raise UserError(
                f"the {split} split of {directory} has {counts.tokens} tokens, and a context of {context} needs "
                f"at least {context + 1}; choose a shorter context, more text, or another data.validation_fraction"
            )

    def _row_ends(self, documents: int) -> np.ndarray:
        """(documents,): how many rows there are up to the end of each document; n tokens make n - 1 targets."""
        self.document_ends = np.memmap(self.directory / f"{self.split}.docs.bin", "<u8", "r", shape=(documents,))
        lengths = np.diff(self.document_ends.astype(np.int64), prepend=0)
        return np.cumsum((lengths - 1 + self.context - 1) // self.context)

    def __len__(self) -> int:
        return self.samples

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise UserError if a model of `vocab_size` tokens cannot read this data (a larger, padded vocabulary can)."""
        if vocab_size < self.manifest.vocab_size:
            raise UserError(
                f"the model has a vocabulary of {vocab_size} tokens and the data in {self.directory} one of "
                f"{self.manifest.vocab_size}; set the model's vocab_size to {self.manifest.vocab_size} or more"
            )

    def batch(self, indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the samples `indices`, each int64 (batch, context); padding has target -100."""
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.samples:
            raise IndexError(f"sample indices {indices.min()}..{indices.max()} given, allowed 0..{self.samples - 1}")
        rows = np.full((len(indices), self.context + 1), self.manifest.eos_token_id, dtype=np.int64)
        ignored = np.zeros((len(indices), self.context), dtype=bool)
        for row, index in enumerate(indices):
            start, end = self._span(int(index))
            rows[row, : end - start] = self.tokens[start:end]
            ignored[row, end - start - 1 :] = True
        rows = torch.from_numpy(rows)  # (batch, context + 1)
        targets = rows[:, 1:].masked_fill(torch.from_numpy(ignored), -100)
        return rows[:, :-1].contiguous(), targets

    def _span(self, index: int) -> tuple[int, int]:
        """Where sample `index` starts and ends in the file; at most context + 1 tokens."""
        if self.packed:
            return index * self.context, index * self.context + self.context + 1
        document = int(np.searchsorted(self.row_ends, index, side="right"))
        row = index - (int(self.row_ends[document - 1]) if document else 0)
        first = int(self.document_ends[document - 1]) if document else 0
        start = first + row * self.context
        return start, min(start + self.context + 1, int(self.document_ends[document]))


class SampleOrder:
    """The order in which samples are used: a new permutation each epoch, a pure function of (seed, epoch).

    Where a run stands is one integer, the samples consumed so far; nothing else is needed to go on, also with another
    number of devices or another batch size. Memory: one permutation, 4 bytes a sample.
    """

    def __init__(self, samples: int, seed: int):
        if samples < 1 or seed < 0:
            raise ValueError(f"samples {samples} and seed {seed} given; allowed: samples >= 1, seed >= 0")
        self.samples, self.seed = samples, seed
        self._epoch, self._permutation = -1, np.empty(0, np.uint32)

    def indices(self, position: int, count: int) -> np.ndarray:
        """The samples at consumed-sample positions [position, position + count), int64 (count,); may cross epochs."""
        parts, end = [np.empty(0, np.int64)], position + count
        while position < end:
            epoch, start = divmod(position, self.samples)
            stop = min(start + end - position, self.samples)
            parts.append(self._of_epoch(epoch)[start:stop].astype(np.int64))
            position += stop - start
        return np.concatenate(parts)

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, epoch])))
            dtype = np.uint32 if self.samples <= 1 << 32 else np.int64
            self._epoch, self._permutation = epoch, generator.permutation(np.arange(self.samples, dtype=dtype))
        return self._permutation
