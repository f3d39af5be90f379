"""The GELU that is compiled for a GPU is torch's, to the last bit that its type can tell apart."""

import pytest
import torch
import torch.nn.functional as F

from mixer.models.masked_mixer.layers import gelu, short_gelu

TYPES = (torch.bfloat16, torch.float16)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Off by the last bit of its type at most, and by the 3e-7 of the distribution."""
    assert (
        (found.double() - exact).abs() <= torch.finfo(found.dtype).eps * exact.abs() + 3e-7
    ).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_16_bit_value_has_the_gelu_and_the_derivative_of_the_exact_one(dtype):
    x = every_value(dtype)
    x = x[x.isfinite()].requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, exact = short_gelu(x), wide * torch.special.ndtr(wide)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    assert y.dtype == dx.dtype == dtype
    assert_rounded_once(y, exact)
    assert_rounded_once(dx, slope)
    with torch.no_grad():
        assert torch.equal(short_gelu(x), y)  # as generation computes it


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_model_compiled_for_a_gpu_has_it(dtype):
    x = every_value(dtype).cuda()
    x = x[x.isfinite()]
    torch._dynamo.reset()
    compiled, short = torch.compile(gelu, fullgraph=True)(x), short_gelu(x)
    torch.testing.assert_close(compiled, short, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert (compiled != F.gelu(x)).any()  # far below zero torch's own is less exact
