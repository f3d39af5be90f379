"""Copies of the state as it is after a step, for the thread that writes them while training goes
on.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

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
    memory, and the next step waits for the copies.

    `take` is called by training, and `fetch` by the writing thread, before the next `take`.
    """

    def __init__(self, device: torch.device, needed: int):
        self.place = device if has_room(device, needed) else torch.device("cpu")
        self.stream = torch.cuda.Stream(device) if self.place.type == "cuda" else None
        self.copies: dict[str, Tensor] = {}
        self.taken = None

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies named tensors, the same ones each time. From here on the tensors may change: on a
        GPU the copies are queued before whatever comes next on the current stream.
        """
        for name, tensor in tensors:
            if name not in self.copies:
                self.copies[name] = torch.empty_like(tensor, device=self.place)
            self.copies[name].copy_(tensor)
        if self.stream is not None:
            self.taken = torch.cuda.current_stream(self.place).record_event()

    def fetch(self) -> dict[str, Tensor]:
        """The copies, in the host's memory."""
        if self.stream is None:
            return self.copies
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.taken)
            return {name: copy.cpu() for name, copy in self.copies.items()}
