"""Reads one split's token file as samples and batches."""

import os
import weakref
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from mixer.common.errors import UserError
from mixer.common.say import Say, say_on_stderr
from mixer.data.manifest import Manifest

DOCUMENTS_AT_ONCE = 4096  # of unpacked data, where rows are found


class TokenFile:
    """One split of prepared data as samples of `context` tokens. `len()` is the number of samples.

    Samples are read from the file when asked for, so memory does not grow with the data, nor with
    what was read of it.

    Packed (the setting the data was prepared with): sample i is tokens[i * context : (i + 1) *
    context + 1], inputs all but its last, targets all but its first; so every token but the first
    of the file is a target once, except for a rest shorter than the context at the very end.
    Otherwise: one document a row, padded with EOS; a longer document is cut into several rows, so
    that each of its tokens but the first is a target exactly once, and rows never mix documents.
    With the setting `cut`, a row has the first `context` tokens of a document, and the rest of it
    is not used, nor its EOS.

    Opening it compares the files with their SHA-256, once on each machine; `say` is told how far
    that is. Raises UserError if the data is missing, cut short, changed, made by another tokenizer
    than the one beside it, or is shorter than one sample.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str,
        context: int,
        say: Say = say_on_stderr,
    ):
        self.directory, self.split, self.context = Path(directory), split, context
        self.manifest = Manifest.load(directory)
        self.manifest.verify(directory, [split], say)
        counts = self.manifest.splits[split]
        self.packed = self.manifest.settings["packed"]
        self.cut = self.manifest.settings.get("cut", False)
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self.file = os.open(self.directory / f"{split}.bin", os.O_RDONLY)
        weakref.finalize(self, os.close, self.file)
        self.rows_before = None if self.packed else self._count_rows(counts.documents)
        self.samples = (counts.tokens - 1) // context if self.packed else int(self.rows_before[-1])
        if self.samples < 1:
            share = "larger" if split == "validation" else "smaller"
            raise UserError(
                f"the {split} split of {directory} has {counts.tokens} tokens, and a context of "
                f"{context} needs at least {context + 1}; choose a shorter context, more text, or "
                f"a {share} data.validation_fraction, and another data.directory for a new text or "
                "fraction"
            )

    @cached_property
    def tokens(self) -> np.ndarray:
        """All of the file, memory-mapped."""
        return np.memmap(self.directory / f"{self.split}.bin", self.dtype, "r")

    @cached_property
    def document_ends(self) -> np.ndarray:
        """(documents,): where each document ends in the file, memory-mapped."""
        return np.memmap(self.directory / f"{self.split}.docs.bin", "<u8", "r")

    def _count_rows(self, documents: int) -> np.ndarray:
        """How many rows there are before every DOCUMENTS_AT_ONCE-th document, and in all."""
        counts = [self._row_ends(first)[-1] for first in range(0, documents, DOCUMENTS_AT_ONCE)]
        return np.cumsum([0, *counts])

    def _row_ends(self, first: int) -> np.ndarray:
        """Rows from document `first` up to the end of each of the next DOCUMENTS_AT_ONCE; n tokens
        make n - 1 targets.
        """
        ends = self.document_ends[first : first + DOCUMENTS_AT_ONCE].astype(np.int64)
        before = int(self.document_ends[first - 1]) if first else 0
        targets = np.diff(ends, prepend=before) - 1
        return np.cumsum(targets > 1 if self.cut else -(-targets // self.context))

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the samples `indices`, each int64 (batch, context); padding has
        target -100.
        """
        indices = np.asarray(indices, dtype=np.int64)
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
        if self.packed:
            return index * self.context, index * self.context + self.context + 1
        part = int(np.searchsorted(self.rows_before, index, side="right")) - 1
        first, row = part * DOCUMENTS_AT_ONCE, index - int(self.rows_before[part])
        row_ends = self._row_ends(first)
        offset = int(np.searchsorted(row_ends, row, side="right"))
        document, row = first + offset, row - (int(row_ends[offset - 1]) if offset else 0)
        begin = int(self.document_ends[document - 1]) if document else 0
        start, end = begin + row * self.context, int(self.document_ends[document])
        return start, min(start + self.context + (not self.cut), end - self.cut)

    def read(self, start: int, end: int) -> np.ndarray:
        """Tokens [start, end). Not through a memory map, whose pages would count as this process's
        memory.
        """
        size = self.dtype.itemsize
        data = os.pread(self.file, (end - start) * size, start * size)
        if len(data) != (end - start) * size:
            raise UserError(
                f"{self.directory / self.split}.bin ends before token {end}: it was cut short "
                f"while it was in use; put it back, or delete {self.directory} and prepare again"
            )
        return np.frombuffer(data, self.dtype)
