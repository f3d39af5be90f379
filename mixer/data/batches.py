"""Reads the batches of a process ahead of the training loop, in a thread, pinned for the GPU."""

import queue
import threading
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
    the thread.
    """

    def __init__(self, data: Samples, order: SampleOrder, share: Share, position: int, pin: bool):
        self.data, self.order, self.share, self.pin = data, order, share, pin
        self.ready: queue.Queue = queue.Queue(STEPS_AHEAD)
        self.closed = threading.Event()
        self.device = torch.cuda.current_device() if pin else None
        self.thread = threading.Thread(
            target=self._read_ahead, args=(position,), name="batches", daemon=True
        )
        self.thread.start()

    def next(self) -> list[Batch]:
        """The next step's micro-batches of this process, on the CPU. Raises what reading them has
        raised.
        """
        made = self.ready.get()
        if isinstance(made, BaseException):
            raise made
        return made

    def at(self, position: int) -> list[Batch]:
        """The micro-batches of the step that begins at `position`."""
        size = self.share.batch_size
        made = [
            self.data.batch(self.order.indices(first, size))
            for first in self.share.first_samples(position)
        ]
        return (
            [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in made]
            if self.pin
            else made
        )

    def close(self) -> None:
        self.closed.set()
        self.thread.join()

    def _read_ahead(self, position: int) -> None:
        # A thread begins with GPU 0, and would take memory there for each process of the host.
        if self.device is not None:
            torch.cuda.set_device(self.device)
        while not self.closed.is_set():
            try:
                made = self.at(position)
            except BaseException as error:  # for the loop to raise
                made = error
            position += self.share.step_samples
            while not self.closed.is_set():
                try:
                    self.ready.put(made, timeout=0.1)
                    break
                except queue.Full:
                    continue


def to_device(batch: Batch, device: torch.device) -> Batch:
    """From pinned memory, the copy to a GPU does not wait for the work that is queued there."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)
