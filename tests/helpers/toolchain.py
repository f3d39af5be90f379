"""What tests that compile the CUDA kernels need to know of this machine."""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from mixer.common.errors import UserError
from mixer.ops import build


def has_nvcc() -> bool:
    try:
        return build.find_nvcc() is not None
    except UserError:
        return False


def first_and_slow(values: Iterable) -> list:
    """Parameters of a test that takes long to compile: one for `make test`, the others for `make
    soak`.
    """
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel."""

    name: str
    registers: int
    spilled_bytes: int


def kernels_of(log: str) -> list[Kernel]:
    """Registers and spills of each kernel, from a build's log."""
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    found = re.findall(pattern, log, re.DOTALL)
    return [
        Kernel(name, int(registers), int(stores) + int(loads))
        for name, stores, loads, registers in found
    ]


needs_gxx = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ here, which torch.compile needs on a CPU"
)
needs_nvcc = pytest.mark.skipif(
    not has_nvcc(), reason="no nvcc here: the kernels cannot be compiled"
)
