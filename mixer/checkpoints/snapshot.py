"""Copies of the state as it is after a step, for the thread that writes them while training goes
on.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

STAGE_BYTES = 64 << 20  # pinned memory through which copies leave the device
# What must stay free beside a snapshot: this share of the device's memory, and no less than this.
SPARE_SHARE, SPARE_BYTES = 0.05, 2 << 30


class Snapshot:
    """Copies of tensors, in buffers that the next snapshot uses again.

    Where a GPU has room for `needed` bytes the buffers are on it: a copy takes milliseconds, and
    `fetch` brings it to the host on a stream of its own, beside the next steps. Else the buffers
    are in the host's memory, and the next step waits for the copies.

    `take` is called by training, and `fetch` by the writing thread, before the next `take`.
    """

    def __init__(self, device: torch.device, needed: int):
        self.place = torch.device("cpu")
        self.copies: dict[str, Tensor] = {}
        self.on_host: dict[str, Tensor] = {}
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            if free >= needed + max(SPARE_BYTES, SPARE_SHARE * total):
                self.place = device
                self.stream, self.taken = torch.cuda.Stream(device), None
                self.stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True)

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies named tensors, the same ones each time. From here on the tensors may change: on a
        GPU the copies are queued before whatever comes next on the current stream.
        """
        for name, tensor in tensors:
            if name not in self.copies:
                self.copies[name] = torch.empty_like(tensor, device=self.place)
            self.copies[name].copy_(tensor)
        if self.place.type == "cuda":
            self.taken = torch.cuda.current_stream(self.place).record_event()

    def fetch(self) -> dict[str, Tensor]:
        """The copies, in the host's memory."""
        if self.place.type == "cpu":
            return self.copies
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.taken)
            return {name: self._fetched(name, copy) for name, copy in self.copies.items()}

    def _fetched(self, name: str, copy: Tensor) -> Tensor:
        """A copy on the host, through pinned memory: a copy to other memory would hold up all that
        training launches meanwhile, and pinning as much as the state takes seconds.
        """
        if name not in self.on_host:
            self.on_host[name] = torch.empty_like(copy, device="cpu")
        host = self.on_host[name]
        source, target = (tensor.view(-1).view(torch.uint8) for tensor in (copy, host))
        for start in range(0, source.numel(), STAGE_BYTES):
            part = source[start : start + STAGE_BYTES]
            stage = self.stage[: part.numel()]
            stage.copy_(part, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)  # this thread sleeps until then
            arrived.record(self.stream)
            arrived.synchronize()
            target[start : start + part.numel()].copy_(stage)
        return host
