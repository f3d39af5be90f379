"""Reads one split's token file as samples and batches."""

import os
import weakref
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from mixer.common.errors import UserError
from mixer.common.ranks import Say, say_on_stderr
from mixer.data.manifest import Manifest


class TokenFile:
    """One split of prepared data as samples of `context` tokens. `len()` is the number of samples.

    Samples are read from the file when asked for. Memory does not grow with what was read, and with
    the data only by 8 bytes a document, where it is not packed.

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
        self.files = {}
        for kind in ("bin", "docs.bin"):
            self.files[kind] = os.open(self.directory / f"{split}.{kind}", os.O_RDONLY)
            weakref.finalize(self, os.close, self.files[kind])
        self.rows_before = None if self.packed else self._count_rows()
        self.samples = (counts.tokens - 1) // context if self.packed else int(self.rows_before[-1])
        if self.samples < 1:
            raise UserError(
                f"the {split} split of {directory} has {counts.tokens} tokens, and a context of "
                f"{context} needs at least {context + 1}; choose a shorter context, or more text "
                "(for validation, a larger data.validation_fraction) and another data.directory"
            )

    @cached_property
    def tokens(self) -> np.ndarray:
        """All of the file, memory-mapped."""
        return np.memmap(self.directory / f"{self.split}.bin", self.dtype, "r")

    @cached_property
    def document_ends(self) -> np.ndarray:
        """(documents,): where each document ends in the file, memory-mapped."""
        return np.memmap(self.directory / f"{self.split}.docs.bin", "<i8", "r")

    def _count_rows(self) -> np.ndarray:
        """(documents + 1,): the rows before each document, and all; n tokens make n - 1 targets."""
        ends = np.fromfile(self.directory / f"{self.split}.docs.bin", "<i8")
        targets = np.diff(ends, prepend=0) - 1
        rows = targets > 1 if self.cut else -(-targets // self.context)
        return np.concatenate([[0], np.cumsum(rows)])

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
        document = int(np.searchsorted(self.rows_before, index, side="right")) - 1
        begin, end = self.document(document)
        start = begin + (index - int(self.rows_before[document])) * self.context
        return start, min(start + self.context + (not self.cut), end - self.cut)

    def document(self, number: int) -> tuple[int, int]:
        """Where document `number` starts and ends in the file, EOS included."""
        ends = self._read("docs.bin", np.dtype("<u8"), max(number - 1, 0), number + 1)
        return int(ends[0]) if number else 0, int(ends[-1])

    def read(self, start: int, end: int) -> np.ndarray:
        """Tokens [start, end)."""
        return self._read("bin", self.dtype, start, end)

    def _read(self, kind: str, dtype: np.dtype, start: int, end: int) -> np.ndarray:
        """Not through a memory map, whose pages would count as this process's memory."""
        size = dtype.itemsize
        data = os.pread(self.files[kind], (end - start) * size, start * size)
        if len(data) != (end - start) * size:
            raise UserError(
                f"{self.directory / self.split}.{kind} ends before number {end}: it was cut short "
                f"while it was in use; put it back, or delete {self.directory} and prepare again"
            )
        return np.frombuffer(data, dtype)
