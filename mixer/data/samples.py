"""Prepared data as samples, the order in which they are used, and the batches of a process, which a
thread reads ahead of the training loop.
"""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mixer.common.errors import UserError
from mixer.data.config import Manifest

STEPS_AHEAD = 2
ROUNDS = 6

Indices = Sequence[int] | np.ndarray  # of samples
Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch, tokens)


class Samples(Protocol):
    """One split of the data, as numbered samples."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> Batch:
        """The samples `indices` as two tensors, each int64 (batch, tokens). Every sample has as
        many tokens, padded where it is shorter.
        """
        ...


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

    def __init__(self, directory: str | Path, split: str, context: int):
        self.path = Path(directory) / split
        self.context = context
        self.manifest = Manifest.load(directory)
        self.manifest.verify(directory, [split])
        self.counts = self.manifest.splits[split]
        self.dtype = np.dtype(self.manifest.dtype)
        self.packed = self.manifest.settings["packed"]
        self.cut = self.manifest.settings.get("cut", False)
        suffixes = ("bin", "docs.bin")
        self.files = {suffix: open(f"{self.path}.{suffix}", "rb") for suffix in suffixes}
        numbers = os.fstat(self.files["docs.bin"].fileno()).st_size // 8
        self.texts = numbers // self.counts.documents  # of a document: one, or two of a pair
        # (documents + 1,): the samples before each document, and all
        self.samples_before = np.concatenate([[0], np.cumsum(self.samples_of_documents())])
        if not len(self):
            raise UserError(
                f"the {split} split of {directory} has {self.counts.tokens} tokens, but "
                f"{self.needed()}; choose a shorter context, or more text for this split (a larger "
                "data.validation_fraction), with another data.directory"
            )

    def needed(self) -> str:
        """What a split must have, in words."""
        return f"a context of {self.context} needs at least {self.context + 1}"

    def all_tokens(self) -> np.ndarray:
        """All of the split, in memory."""
        return self.read(0, self.counts.tokens)

    def document_ends(self) -> np.ndarray:
        """(documents,) int64: where each document ends in the file, EOS included."""
        return self.text_ends(0, self.counts.documents)[:, -1]

    def text_ends(self, first: int, last: int) -> np.ndarray:
        """(last - first, texts) int64: where the texts of documents [first, last) end, EOS
        included: query and target of a pair, otherwise the document alone.
        """
        ends = self.read(first * self.texts, last * self.texts, "docs.bin")
        return ends.reshape(-1, self.texts)

    def samples_of_documents(self) -> np.ndarray:
        """(documents,): how many samples each document has. Packed text is one document."""
        if self.packed:
            return np.array([(self.counts.tokens - 1) // self.context])
        targets = np.diff(self.document_ends(), prepend=0) - 1
        return targets > 1 if self.cut else -(-targets // self.context)

    def __len__(self) -> int:
        return int(self.samples_before[-1])

    def batch(self, indices: Indices) -> Batch:
        """Inputs and targets of the samples `indices`, each int64 (batch, context); padding has
        target -100.
        """
        shape = (len(indices), self.context + 1)
        rows = np.full(shape, self.manifest.eos_token_id, dtype=np.int64)
        ignored = np.zeros((len(indices), self.context), dtype=bool)
        for row, index in enumerate(indices):
            start, end = self.span(int(index))
            rows[row, : end - start] = self.read(start, end)
            ignored[row, end - start - 1 :] = True
        return with_targets(rows, ignored)

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
        ends = self.text_ends(max(document - 1, 0), document + 1)[:, -1]
        return int(ends[0]) if document else 0, int(ends[-1]), number

    def read(self, start: int, end: int, suffix: str = "bin") -> np.ndarray:
        """Numbers [start, end) of a file of the split: tokens, or where texts end. Not through a
        memory map: its pages would count as this process's memory, and those of a file that is cut
        would end it without a word.

        Raises UserError if the file no longer has them, which was whole when it was opened.
        """
        numbers = np.empty(end - start, self.dtype if suffix == "bin" else "<i8")
        buffer = numbers.view(np.uint8).data
        offset = start * numbers.itemsize
        filled = 0
        try:
            while filled < len(buffer):  # the system reads at most 2 GB at a time
                descriptor = self.files[suffix].fileno()
                count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
                if not count:
                    raise OSError("it is shorter now")
                filled += count
        except OSError as error:
            raise UserError(
                f"{self.path}.{suffix} can no longer be read ({error}): restore it, or delete its "
                "folder to prepare again, and run the same command again"
            ) from None
        return numbers


def with_targets(rows: np.ndarray, ignored: np.ndarray) -> Batch:
    """All but the last token of each row, and the token that comes next; -100 for what is ignored.

    rows: (batch, tokens + 1) int64. ignored: (batch, tokens) bool, or (tokens,) for all rows alike.
    """
    tokens = torch.from_numpy(rows)
    targets = tokens[:, 1:].masked_fill(torch.from_numpy(ignored), -100)
    return tokens[:, :-1].contiguous(), targets


class SampleOrder:
    """A new permutation of the samples each epoch, a pure function of (seed, epoch, position in the
    epoch). It is computed one position at a time, so that no process holds an index of all samples.
    Where a run stands is one integer, the samples consumed so far, also with another number of
    devices or another batch size.

    A position is permuted by a Feistel network: its two halves of bits are mixed in turn, each by a
    keyed hash of the other, which is a bijection whatever the hash. Numbers beyond the samples are
    permuted again until they fall among them ("cycle walking"). All of it is arithmetic on 64-bit
    integers: the order is the same with every version of numpy.
    """

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.seed = seed
        self.half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)

    def indices(self, position: int, count: int) -> np.ndarray:
        """The samples at consumed-sample positions [position, position + count), int64 (count,);
        may cross epochs.
        """
        chunks = [np.empty(0, np.int64)]  # of an epoch each
        end = position + count
        while position < end:
            epoch, start = divmod(position, self.samples)
            stop = min(start + end - position, self.samples)
            chunks.append(self._permuted(np.arange(start, stop, dtype=np.uint64), epoch))
            position += stop - start
        return np.concatenate(chunks)

    def _permuted(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        names = [f"{self.seed}/{epoch}/{number}" for number in range(ROUNDS)]
        keys = [np.uint64(hash_number(name)) for name in names]
        indices = self._feistel(positions, keys)
        while (outside := indices >= self.samples).any():
            indices[outside] = self._feistel(indices[outside], keys)
        return indices.astype(np.int64)

    def _feistel(self, numbers: np.ndarray, keys: list[np.uint64]) -> np.ndarray:
        bits = np.uint64(self.half_bits)
        mask = np.uint64((1 << self.half_bits) - 1)
        left = numbers >> bits
        right = numbers & mask
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) & mask)
        return (left << bits) | right


def mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, which spreads each bit over all; products wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_number(text: str) -> int:
    """64 bits of a text: FNV-1a, mixed."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return int(mixed(np.array([value], np.uint64))[0])


class Batches:
    """The micro-batches of steps that begin at `position`, one step after the other; `close` ends
    the thread that reads them.

    A step's samples are dealt out to micro-batches, and then to processes, so that their order is
    the same for any number of both.

    Args:
        micro_batches: of a step.
        batch_size: samples of a process in each of them.
        rank, world_size: which of how many processes this is.
        pin: whether batches are in pinned memory, for a GPU.
    """

    def __init__(
        self,
        data: Samples,
        order: SampleOrder,
        *,
        micro_batches: int,
        batch_size: int,
        rank: int,
        world_size: int,
        position: int,
        pin: bool,
    ):
        self.data = data
        self.order = order
        self.batch_size = batch_size
        self.position = position
        self.pin = pin
        self.first = rank * self.batch_size
        self.stride = world_size * self.batch_size
        self.step_samples = micro_batches * self.stride  # of all processes
        self.ahead = deque[Future]()
        if pin:
            # A thread begins with GPU 0, and would take memory there for each process of the host.
            set_device = torch.cuda.set_device, (torch.cuda.current_device(),)
            self.thread = ThreadPoolExecutor(1, "batches", *set_device)
        else:
            self.thread = ThreadPoolExecutor(1, "batches")

    def next(self) -> list[Batch]:
        """The next step's micro-batches of this process, on the CPU. Raises what reading them has
        raised.
        """
        while len(self.ahead) <= STEPS_AHEAD:
            self.ahead.append(self.thread.submit(self.at, self.position))
            self.position += self.step_samples
        return self.ahead.popleft().result()

    def at(self, position: int) -> list[Batch]:
        """The micro-batches of the step that begins at `position`."""
        starts = range(position + self.first, position + self.step_samples, self.stride)
        batches = [self.data.batch(self.order.indices(start, self.batch_size)) for start in starts]
        if self.pin:
            return [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches]
        return batches

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """From pinned memory, the copy to a GPU does not wait for the work that is queued there."""
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
