"""Out of memory: told apart from other errors, and said in one message with the sizes behind it."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mixer.common.errors import UserError
from mixer.common.hardware import peak_memory_gb

# What PyTorch's allocators for GPUs and CPUs, the CUDA driver and cuBLAS say.
SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
# As PyTorch and NumPy say it.
ASKED_FOR = re.compile(r"(?:tried|unable) to allocate ([\d.]+ \w+)", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the host had too little memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def out_of_memory(
    error: BaseException, device: torch.device, what: str, sizes: str, remedy: str
) -> UserError:
    """The error to end with in place of one that `is_out_of_memory`.

    what: was being done; sizes: what decides how much memory that takes; remedy: what to lower.
    """
    asked = ASKED_FOR.search(str(error))
    wanted = f", and {asked[1]} more were asked for" if asked else ""
    place = "the host's memory"
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        place = f"{device} ({torch.cuda.get_device_name(device)}, {total:.1f} GiB)"
    return UserError(
        f"out of memory on {place} while {what}: the peak was {peak_memory_gb(device):.2f} GiB"
        f"{wanted}. Sizes: {sizes}. {remedy}"
    )


@contextmanager
def memory_for(device: torch.device, what: str, sizes: str, remedy: str) -> Iterator[None]:
    """Raises the UserError of `out_of_memory` where what is done inside runs out of it."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, device, what, sizes, remedy) from None
