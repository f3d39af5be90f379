"""Reads the batches of a process ahead of the training loop, in a thread, pinned for the GPU."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from mixer.data.order import SampleOrder
from mixer.data.run_data import Samples

STEPS_AHEAD = 2

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (batch, tokens)


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

    def first_samples(self, position: int) -> list[int]:
        """Where in the order each of this process's micro-batches begins, for a step that begins at
        `position`.
        """
        own = position + self.rank * self.batch_size
        return [
            own + micro * self.batch_size * self.processes for micro in range(self.micro_batches)
        ]


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
        """The next step's micro-batches of this process, on the CPU. Raises what reading them has
        raised.
        """
        while len(self.ahead) <= STEPS_AHEAD:
            self.ahead.append(self.thread.submit(self.at, self.position))
            self.position += self.share.step_samples
        return self.ahead.popleft().result()

    def at(self, position: int) -> list[Batch]:
        """The micro-batches of the step that begins at `position`."""
        made = [
            self.data.batch(self.order.indices(first, self.share.batch_size))
            for first in self.share.first_samples(position)
        ]
        return [tuple(part.pin_memory() for part in batch) for batch in made] if self.pin else made

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """From pinned memory, the copy to a GPU does not wait for the work that is queued there."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)
