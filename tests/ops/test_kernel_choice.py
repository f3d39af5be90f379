"""Which kernels serve, without a GPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from toolchain import needs_nvcc

from mixer.common.errors import UserError
from mixer.ops import build, choice, cuda

PROCESSORS = 132


pytestmark = needs_nvcc


@pytest.fixture(scope="module")
def library(kernel_cache):
    return cuda.load(str(build.library((9, 0))))


@pytest.mark.parametrize(
    "capability, dtype, channels, heads, serving",
    [
        (90, "bfloat16", 1024, 1, 90),
        (90, "float16", 1024, 8, 90),
        (90, "bfloat16", 20, 1, 0),  # rows that do not start on 16 bytes
        (90, "float32", 1024, 1, 80),
        (86, "bfloat16", 1024, 1, 80),
        (75, "float16", 1024, 1, 70),
        (70, "float16", 1024, 4, 70),
        (70, "float16", 1020, 1, 0),
        (70, "bfloat16", 1024, 1, 0),
        (70, "float32", 1024, 1, 0),
    ],
)
def test_the_fastest_kernels_that_can_serve(library, capability, dtype, channels, heads, serving):
    params = cuda.Params(
        batch=2,
        tokens=512,
        context=512,
        columns=512,
        channels=channels,
        heads=heads,
        dtype=cuda.DTYPE_CODES[getattr(torch, dtype)],
        capability=capability,
        processors=PROCESSORS,
    )
    assert library.mixer_kernels_capability(ctypes.byref(params)) == serving


@pytest.mark.parametrize(
    ("capability", "dtype", "tf32", "is_aligned", "reason"),
    [
        (90, "bfloat16", False, True, None),
        (90, "float32", True, True, None),
        (70, "float16", False, True, None),
        (90, "float32", False, True, "TF32 for float32, which is off here"),
        (90, "bfloat16", False, False, "heads of a multiple of 8 channels"),
        (75, "bfloat16", False, True, "float16 before compute capability 8.0"),
        (90, "float64", False, True, "x is torch.float64"),
    ],
)
def test_auto_takes_the_kernels_for_what_they_serve_and_says_why_not(
    monkeypatch, caplog, capability, dtype, tf32, is_aligned, reason
):
    """A GPU whose kernels are built. What the rule takes is what the library serves: see above."""
    monkeypatch.setattr(cuda, "device_facts", lambda index: (capability, PROCESSORS))
    monkeypatch.setattr(cuda, "allows_tf32", lambda: tf32)
    monkeypatch.setattr(choice, "device_reason", lambda index: None)
    choice.warn_once.cache_clear()
    dtype = getattr(torch, dtype)
    x = SimpleNamespace(
        dtype=dtype,
        shape=(2, 512, 64 if is_aligned else 20),
        device=torch.device("cuda", 0),
        is_cuda=True,
        element_size=lambda: dtype.itemsize,
    )
    assert choice.kernels_take("auto", x, heads=2) == (reason is None)
    assert (reason or "") in caplog.text
    if reason:
        with pytest.raises(UserError, match=f"'cuda' cannot run here: .*{reason}"):
            choice.kernels_take("cuda", x, heads=2)
    assert not choice.kernels_take("dense", x, heads=2)
