"""The mean of gradients over the GPUs of a host by their copy engines, as a communication hook of
DDP.

NCCL adds up with thread blocks of its own, and while these hold some of a GPU's multiprocessors,
products that are laid out for all of them take up to twice their time. Copies over NVLink hold
none. Each GPU is sent the others' values of its part of a bucket, takes the mean in one kernel, and
the others fetch it. A GPU that is early waits in its stream, not in a kernel. The order of adding
up is that of the ranks, however DDP lays out its buckets.

Measured in dev/LOG.md, "Summing gradients with the copy engines".
"""

import ctypes
import functools

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl
from torch import Tensor

ALIGNED = 64  # values: parts of a bucket begin on addresses that suit copies
BLOCK = 2048  # values that a program of the kernel takes the mean of


class CopyEngineMean:
    """`reduce` is the hook: a bucket of fp32 gradients becomes its mean over all ranks, on a stream
    of its own.

    Ranks must be processes of one host, each with a GPU that the others can write to; RuntimeError
    otherwise. All must give it the same buckets in the same order, as DDP does. It holds (ranks +
    1) / ranks of the largest bucket.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # in an order in which no rank is sent to by all at once
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.stream = torch.cuda.Stream(device)
        # values in each of this rank's rows of memory, one from each rank and one for the mean
        self.rows = 0
        self.met = 0  # how often the ranks have met
        # how often each rank had come to meet this one
        self.flags = self._shared(torch.int32, self.ranks)
        self.flags.own.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])

    def reduce(self, _state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._mean(bucket.buffer())
            future = torch.futures.Future(devices=[self.device])
            future.set_result(bucket.buffer())  # who waits for it waits for this stream
        return future

    def _mean(self, bucket: Tensor) -> None:
        size = -(-bucket.numel() // (self.ranks * ALIGNED)) * ALIGNED
        if size > self.rows:
            torch.cuda.synchronize(self.device)  # what is still to be read from the old memory
            self.memory, self.rows = self._shared(torch.float32, (self.ranks + 1) * size), size
        # The last may be shorter, or empty.
        parts = [bucket[rank * size : (rank + 1) * size] for rank in range(self.ranks)]
        own = parts[self.rank]
        for rank in self.others:
            self._row(rank, self.rank, parts[rank]).copy_(parts[rank])
        self._meet()
        if own.numel():
            blocks = (-(-own.numel() // BLOCK),)
            mean_kernel[blocks](
                own, self.memory.own, own.numel(), self.rows, self.ranks, self.rank, BLOCK
            )
        self._meet()
        for rank in self.others:
            parts[rank].copy_(self._row(rank, self.ranks, parts[rank]))

    def _row(self, rank: int, row: int, like: Tensor) -> Tensor:
        """As many values as `like` has of a row in a rank's memory."""
        return self.memory.handle.get_buffer(rank, like.shape, torch.float32, row * self.rows)

    def _shared(self, dtype: torch.dtype, values: int) -> "Shared":
        own = symmetric_memory.empty(values, dtype=dtype, device=self.device)
        return Shared(own, symmetric_memory.rendezvous(own, dist.group.WORLD))

    def _meet(self) -> None:
        """What follows in any rank's stream comes after what all of them have been given so far."""
        self.met += 1
        addresses = self.flags.handle.buffer_ptrs
        for rank in self.others:
            queue("cuStreamWriteValue32_v2", self.stream, addresses[rank] + 4 * self.rank, self.met)
        for rank in self.others:
            queue("cuStreamWaitValue32_v2", self.stream, addresses[self.rank] + 4 * rank, self.met)


class Shared:
    """Memory of which every rank has as much, and can read and write the others'."""

    def __init__(self, own: Tensor, handle):
        self.own, self.handle = own, handle


@triton.jit
def mean_kernel(
    own, memory, size, rows, ranks: tl.constexpr, rank: tl.constexpr, block: tl.constexpr
):
    """own (size,) fp32 becomes the mean of itself and the other ranks' rows of memory (ranks + 1,
    rows), as does the last row.
    """
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < size
    total = tl.zeros((block,), tl.float32)
    for other in tl.static_range(ranks):
        if other == rank:
            total += tl.load(own + place, inside)
        else:
            total += tl.load(memory + other * rows + place, inside)
    mean = total / ranks
    tl.store(own + place, mean, inside)
    tl.store(memory + ranks * rows + place, mean, inside)


def queue(operation: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Queues that the 32 bits at an address become the value, or are waited for until they are no
    less (mod 2^32).
    """
    arguments = (
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value),
        ctypes.c_uint(0),
    )
    error = getattr(driver(), operation)(*arguments)
    if error:
        raise RuntimeError(f"{operation} failed with the CUDA driver's error {error}")


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
