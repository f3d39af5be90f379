"""Tokenises a batch of texts: the task of a worker."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import cached_property

import numpy as np

from mixer.data.corpus import Batch, FixedSplits, is_document, split_of, texts_of
from mixer.data.manifest import SPLITS
from mixer.data.tokenizer import pieces, token_encoder


@dataclass
class Counts:
    """Counts of one split. missing: rows without text; where both splits are cut from one source,
    all of them count for `train`.
    """

    missing: int = 0
    documents: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0
    max_token_id: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        *sums, _ = map(sum, zip(astuple(self), astuple(other), strict=True))
        return Counts(*sums, max(self.max_token_id, other.max_token_id))


@dataclass
class Tokens:
    """The tokens of one split of a batch, as the token files hold them."""

    counts: Counts = field(default_factory=Counts)
    ids: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)  # where each document ends, in tokens


@dataclass(frozen=True)
class Tokenise:
    """Makes tokens of the documents of a batch, for each split."""

    specification: str  # of the tokenizer
    dtype: str
    eos: int
    validation_fraction: float
    fixed: FixedSplits
    are_pairs: bool = False

    def __call__(self, batch: Batch) -> dict[str, Tokens]:
        splits = {name: Tokens() for name in SPLITS}
        for text in batch.texts:
            if is_document(text):
                split = batch.split or split_of(text, self.validation_fraction, self.fixed)
                self._add(text, splits[split])
            splits[batch.split or "train"].counts.missing += text is None
        for tokens in splits.values():
            ids = np.frombuffer(tokens.ids, self._file_type)
            tokens.counts.max_token_id = int(ids.max(initial=0))
        return splits

    def _add(self, text: str, tokens: Tokens) -> None:
        counts = tokens.counts
        for part in texts_of(text, self.are_pairs):
            for piece in pieces(part):
                tokens.ids += self._encode(piece)
            tokens.ids += np.array([self.eos], self._file_type).tobytes()
            counts.bytes += len(part.encode())
            counts.words += len(part.split())
        counts.documents += 1
        counts.tokens = len(tokens.ids) // self._file_type.itemsize
        tokens.ends.append(counts.tokens)

    @cached_property
    def _file_type(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def _encode(self) -> Callable[[str], bytes]:
        return token_encoder(self.specification, self._file_type)
