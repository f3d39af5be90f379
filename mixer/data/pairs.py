"""Pairs of texts, from the token files that samples are read from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mixer.common.errors import UserError
from mixer.common.ranks import Say, say_on_stderr
from mixer.data.token_file import TokenFile


class PairFile:
    """One split of prepared data as pairs of texts of at most `context` tokens each.

    Prepared with data.pair_field, a document is a pair: query, EOS, target, EOS. Others are cut
    into passages of `context` tokens, of which the first and second are a pair, the third and
    fourth, and so on; the rest at the end of a document is in none. Raises UserError as TokenFile
    does, and where there is no pair.
    """

    def __init__(self, directory: str | Path, split: str, context: int, say: Say = say_on_stderr):
        self.file, self.context = TokenFile(directory, split, context, say), context
        self.are_rows = "pair_field" in self.file.manifest.settings
        sizes = np.diff(self.file.document_ends, prepend=0) - 1  # without EOS
        each = np.ones_like(sizes) if self.are_rows else sizes // (2 * context)
        self.before = np.concatenate([[0], np.cumsum(each)])  # pairs before each document, and all
        if not len(self):
            raise UserError(
                f"no document in the {split} split of {directory} has two passages of {context} "
                "tokens; give longer documents, or a shorter model.max_position_embeddings"
            )

    def __len__(self) -> int:
        return int(self.before[-1])

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
        document = int(np.searchsorted(self.before, index, side="right")) - 1
        start, end = self.file.document(document)
        if self.are_rows:
            tokens = self.file.read(start, end - 1)
            middle = int((tokens == self.file.manifest.eos_token_id).argmax())
            return tokens[:middle], tokens[middle + 1 :]
        start += 2 * self.context * (index - int(self.before[document]))
        tokens = self.file.read(start, start + 2 * self.context)
        return tokens[: self.context], tokens[self.context :]
