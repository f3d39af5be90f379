"""Copies of the state as it is after a step, for the thread that writes them while training goes
on.

Both kinds are used alike. `begin`, `copy` for each tensor, and `finish` are called by training,
which calls `before_change` before whatever changes the tensors. `fetch` is called by the writing
thread, and returns the copies in the host's memory. The next `begin` comes after that.
"""

import math

import torch
from torch import Tensor

ALIGNED = 512  # bytes: where each tensor of a snapshot begins
QUEUED_BYTES = 256 << 20  # as many are copied at once: one launch for many tensors
STAGE_BYTES = 64 << 20  # pinned memory through which a snapshot leaves the device
# What must stay free beside a snapshot: this share of the device's memory, and no less than this.
SPARE_SHARE, SPARE_BYTES = 0.05, 2 << 30


def choose_copy(device: torch.device, needed: int) -> "HostCopy | DeviceCopy":
    """A DeviceCopy where a GPU has room for it, else a HostCopy. needed: bytes."""
    if has_room(device, needed):
        try:
            return DeviceCopy(device, needed)
        except torch.OutOfMemoryError:
            pass  # someone else was faster
    return HostCopy(device)


def has_room(device: torch.device, needed: int) -> bool:
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free >= needed + max(SPARE_BYTES, SPARE_SHARE * total)


def room_for(tensors: list[Tensor]) -> int:
    """The bytes that a snapshot of these tensors takes."""
    return sum(_padded(tensor) for tensor in tensors)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def _fits(buffer: Tensor | None, tensor: Tensor) -> bool:
    return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


class DeviceCopy:
    """Copies on the device, which takes milliseconds; `fetch` brings them to the host on a stream
    of its own, beside the next steps. Training waits for neither.

    It holds `room` bytes for the rest of the run, on the device and on the host.
    """

    def __init__(self, device: torch.device, room: int):
        self.device, self.room = device, room
        self.memory = torch.empty(room, dtype=torch.uint8, device=device)
        self.views: dict[int, Tensor] = {}  # of memory, by first byte: making them takes time
        self.on_host: dict[str, Tensor] = {}
        pinned = device.type == "cuda"
        # Here, not by the writing thread: pinning beside training holds up what it launches.
        staged = min(room, STAGE_BYTES)  # none where another process does the copying
        self.stage = torch.empty(staged, dtype=torch.uint8, pin_memory=pinned)
        self.stream = torch.cuda.Stream(device) if pinned else None
        self.taken = None
        self.begin()

    def begin(self) -> None:
        self.end, self.copies = 0, {}
        self.places, self.queued, self.queued_bytes = [], [], 0

    def copy(self, name: str, tensor: Tensor) -> None:
        place = self._next_place(tensor)
        self.copies[name] = place
        self.places.append(place)
        self.queued.append(tensor)
        self.queued_bytes += tensor.nbytes
        if self.queued_bytes > QUEUED_BYTES:
            self._copy_queued()

    def finish(self) -> None:
        """From here on the tensors may change: the copies are queued before whatever comes next on
        the current stream.
        """
        self._copy_queued()
        if self.stream is not None:
            self.taken = torch.cuda.current_stream(self.device).record_event()

    def before_change(self) -> None:
        """Nothing to wait for."""

    def fetch(self) -> dict[str, Tensor]:
        if self.stream is None:
            return {name: self._fetched(name, copy) for name, copy in self.copies.items()}
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.taken)
            return {name: self._fetched(name, copy) for name, copy in self.copies.items()}

    def _next_place(self, tensor: Tensor) -> Tensor:
        """Where the next tensor goes, which is of this shape and type."""
        start, self.end = self.end, self.end + _padded(tensor)
        view = self.views.get(start)
        if not _fits(view, tensor):
            view = self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self.views[start] = view
        return view

    @torch.no_grad()
    def _copy_queued(self) -> None:
        if self.queued:
            torch._foreach_copy_(self.places, self.queued)
        self.places, self.queued, self.queued_bytes = [], [], 0

    def _fetched(self, name: str, copy: Tensor) -> Tensor:
        """A copy of a snapshot's tensor on the host, through pinned memory: pinning as much as the
        state would take seconds.
        """
        if not _fits(self.on_host.get(name), copy):
            self.on_host[name] = torch.empty(copy.shape, dtype=copy.dtype)
        target, source = (_bytes(tensor) for tensor in (self.on_host[name], copy))
        for start in range(0, source.numel(), STAGE_BYTES):
            part = source[start : start + STAGE_BYTES]
            stage = self.stage[: part.numel()]
            stage.copy_(part, non_blocking=True)
            if self.stream is not None:
                arrived = torch.cuda.Event(blocking=True)  # this thread sleeps until then
                arrived.record(self.stream)
                arrived.synchronize()
            target[start : start + part.numel()].copy_(stage)
        return self.on_host[name]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class HostCopy:
    """Copies to the host's memory, into buffers that the next copy uses again.

    On a GPU the buffers are pinned, and the copies run on a stream of their own, beside the work
    queued there; `before_change` makes the GPU wait for them. Pinning takes seconds for a large
    model; it happens in the first copy.
    """

    room = math.inf

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: dict[str, Tensor] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.done = None
        self.begin()

    def begin(self) -> None:
        self.names: list[str] = []

    def copy(self, name: str, tensor: Tensor) -> None:
        if not _fits(self.buffers.get(name), tensor):
            pinned = self.stream is not None
            self.buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self.names.append(name)
        buffer = self.buffers[name]
        if self.stream is None:
            buffer.copy_(tensor.detach())
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            buffer.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self.stream)
            self.done = self.stream.record_event()

    def finish(self) -> None:
        """The copies are queued, and not yet made: see `before_change`."""

    def before_change(self) -> None:
        """Makes the GPU wait for the copies; this process does not wait."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)

    def fetch(self) -> dict[str, Tensor]:
        if self.done is not None:
            self.done.synchronize()
        return {name: self.buffers[name] for name in self.names}
