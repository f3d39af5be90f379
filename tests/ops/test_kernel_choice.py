"""Which calls the kernels take, without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from mixer.common.errors import UserError
from mixer.ops import choice, cuda


@pytest.fixture
def precision():
    """Sets torch's precision of fp32 products."""
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


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
    monkeypatch, caplog, precision, capability, dtype, tf32, is_aligned, reason
):
    """On a GPU whose kernels are built."""
    monkeypatch.setattr(cuda, "device_facts", lambda index: (capability, 132))
    monkeypatch.setattr(choice, "device_reason", lambda index: None)
    precision("high" if tf32 else "highest")
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
