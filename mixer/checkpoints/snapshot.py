"""Copies of the state as it is after a step, for the thread that writes them while training goes
on.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

QUEUED_BYTES = 256 << 20  # as many are copied at once: one launch for many tensors
STAGE_BYTES = 64 << 20  # pinned memory through which copies leave the device
# What must stay free beside a snapshot: this share of the device's memory, and no less than this.
SPARE_SHARE, SPARE_BYTES = 0.05, 2 << 30


def has_room(device: torch.device, needed: int) -> bool:
    """Whether a snapshot of `needed` bytes fits into a GPU's memory; on a CPU there is no GPU."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free >= needed + max(SPARE_BYTES, SPARE_SHARE * total)


class Snapshot:
    """Copies of tensors, in buffers that the next snapshot uses again.

    Where a GPU has room the buffers are on it: a copy takes milliseconds, and `fetch` brings it to
    the host on a stream of its own, beside the next steps. Else the buffers are in the host's
    memory (pinned, if there is a GPU), and the next step waits for the copies.

    `take` is called by training, and `fetch` by the writing thread, before the next `take`.
    """

    def __init__(self, device: torch.device, needed: int):
        self.device, self.on_device = device, has_room(device, needed)
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.buffers = _Buffers(device if self.on_device else torch.device("cpu"), pinned=on_gpu)
        self.on_host = _Buffers(torch.device("cpu"), pinned=False)
        # Pinned here, not by the writing thread: pinning beside training holds up what it launches.
        staged = min(needed, STAGE_BYTES) if self.on_device else 0
        self.stage = torch.empty(staged, dtype=torch.uint8, pin_memory=on_gpu)
        self.names: list[str] = []
        self.taken = None

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Queues copies of named tensors. From here on the tensors may change: the copies are
        queued before whatever comes next on the current stream.
        """
        self.names, targets, sources, queued = [], [], [], 0
        for name, tensor in tensors:
            self.names.append(name)
            targets.append(self.buffers.like(name, tensor))
            sources.append(tensor)
            queued += tensor.nbytes
            if queued > QUEUED_BYTES:
                torch._foreach_copy_(targets, sources, non_blocking=True)
                targets, sources, queued = [], [], 0
        if sources:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if self.stream is not None:
            self.taken = torch.cuda.current_stream(self.device).record_event()

    def fetch(self) -> dict[str, Tensor]:
        """The copies, in the host's memory."""
        if not self.on_device:
            if self.taken is not None:
                self.taken.synchronize()
            return {name: self.buffers[name] for name in self.names}
        if self.stream is None:
            return {name: self._fetched(name) for name in self.names}
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.taken)
            return {name: self._fetched(name) for name in self.names}

    def _fetched(self, name: str) -> Tensor:
        """A copy on the host, through pinned memory: to pin as much as the state takes seconds."""
        copy = self.buffers[name]
        host = self.on_host.like(name, copy)
        source, target = (tensor.view(-1).view(torch.uint8) for tensor in (copy, host))
        for start in range(0, source.numel(), STAGE_BYTES):
            part = source[start : start + STAGE_BYTES]
            stage = self.stage[: part.numel()]
            stage.copy_(part, non_blocking=True)
            if self.stream is not None:
                arrived = torch.cuda.Event(blocking=True)  # this thread sleeps until then
                arrived.record(self.stream)
                arrived.synchronize()
            target[start : start + part.numel()].copy_(stage)
        return host


class _Buffers(dict[str, Tensor]):
    """A tensor for each name, made when it is first needed."""

    def __init__(self, device: torch.device, pinned: bool):
        super().__init__()
        self.how = {"device": device, "pin_memory": pinned and device.type == "cpu"}

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of that name, of this shape and type."""
        held = self.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = self[name] = torch.empty(tensor.shape, dtype=tensor.dtype, **self.how)
        return held
