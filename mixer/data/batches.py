"""The order in which samples are used, and the batches of a process, which a thread reads ahead of
the training loop.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

STEPS_AHEAD = 2
ROUNDS = 6
UINT64 = (1 << 64) - 1

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch, tokens)


class Samples(Protocol):
    """What batches are made of: a TokenFile, a PairFile or TaskSamples."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch: ...


# --- the order ---------------------------------------------------------------


class SampleOrder:
    """A new permutation of the samples each epoch, a pure function of (seed, epoch, place in the
    epoch). It is computed one place at a time, so that no process holds an index of all samples.
    Where a run stands is one integer, the samples consumed so far, also with another number of
    devices or another batch size.

    A place is permuted by a Feistel network: its two halves of bits are mixed in turn, each by a
    keyed hash of the other, which is a bijection whatever the hash. Numbers beyond the samples are
    permuted again until they fall among them ("cycle walking"). All of it is arithmetic on 64-bit
    integers: the order is the same with every version of numpy.
    """

    def __init__(self, samples: int, seed: int):
        self.samples, self.seed = samples, seed
        self.half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)

    def indices(self, position: int, count: int) -> np.ndarray:
        """The samples at consumed-sample positions [position, position + count), int64 (count,);
        may cross epochs.
        """
        parts, end = [np.empty(0, np.int64)], position + count
        while position < end:
            epoch, start = divmod(position, self.samples)
            stop = min(start + end - position, self.samples)
            parts.append(self._permuted(np.arange(start, stop, dtype=np.uint64), epoch))
            position += stop - start
        return np.concatenate(parts)

    def _permuted(self, places: np.ndarray, epoch: int) -> np.ndarray:
        keys = [np.uint64(hash_number(f"{self.seed}/{epoch}/{number}")) for number in range(ROUNDS)]
        places = self._feistel(places, keys)
        while (outside := places >= self.samples).any():
            places[outside] = self._feistel(places[outside], keys)
        return places.astype(np.int64)

    def _feistel(self, places: np.ndarray, keys: list[np.uint64]) -> np.ndarray:
        bits, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        left, right = places >> bits, places & mask
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
        value = ((value ^ byte) * 0x100000001B3) & UINT64
    return int(mixed(np.array([value], np.uint64))[0])


# --- the batches -------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """How a step's samples are dealt out: to micro-batches, then to processes; the order is the
    same for any number of both.
    """

    batch_size: int  # samples of a process in a micro-batch
    micro_batches: int
    processes: int
    rank: int

    @property
    def step_samples(self) -> int:
        return self.batch_size * self.micro_batches * self.processes

    def starts(self, position: int) -> range:
        """Where in the order this process's micro-batches begin, of a step that begins there."""
        first, stride = position + self.rank * self.batch_size, self.batch_size * self.processes
        return range(first, position + self.step_samples, stride)


class Batches:
    """The micro-batches of steps that begin at `position`, one step after the other; `close` ends
    the thread that reads them.
    """

    def __init__(self, data: Samples, order: SampleOrder, share: Share, position: int, pin: bool):
        self.data, self.order, self.share, self.pin = data, order, share, pin
        self.position, self.ahead = position, deque[Future]()
        # A thread begins with GPU 0, and would take memory there for each process of the host.
        begin = (torch.cuda.set_device, (torch.cuda.current_device(),)) if pin else (None, ())
        self.thread = ThreadPoolExecutor(1, "batches", *begin)

    def next(self) -> list[Batch]:
        """The next step's micro-batches of this process, on the CPU (pinned, with `pin`). Raises
        what reading them has raised.
        """
        while len(self.ahead) <= STEPS_AHEAD:
            self.ahead.append(self.thread.submit(self.at, self.position))
            self.position += self.share.step_samples
        return self.ahead.popleft().result()

    def at(self, position: int) -> list[Batch]:
        """The micro-batches of the step that begins at `position`."""
        made = [
            self.data.batch(self.order.indices(first, self.share.batch_size))
            for first in self.share.starts(position)
        ]
        return [tuple(part.pin_memory() for part in batch) for batch in made] if self.pin else made

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """From pinned memory, the copy to a GPU does not wait for the work that is queued there."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)
