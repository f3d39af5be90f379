"""What tests that compile the CUDA kernels need to know of this machine."""

import re
import shutil
from collections.abc import Iterable

import pytest

from mixer.common.errors import UserError
from mixer.ops import build


def first_and_slow(values: Iterable) -> list:
    """Parameters of a test that takes long to compile: one for `make test`, the others for `make
    soak`.
    """
    first, *later = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in later)]


def spills_of(log: str) -> dict[str, int]:
    """The spilled bytes of each kernel, from a build's log."""
    kernel = r"Compiling entry function '(\w+)'"
    spills = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
    matches = re.findall(f"{kernel}.*?{spills}", log, re.DOTALL)
    return {name: int(stores) + int(loads) for name, stores, loads in matches}


needs_gxx = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ here, which torch.compile needs on a CPU"
)


def has_nvcc() -> bool:
    try:
        return bool(build.find_nvcc())
    except UserError:
        return False


needs_nvcc = pytest.mark.skipif(
    not has_nvcc(), reason="no nvcc here: the kernels cannot be compiled"
)
