"""The dense form that the kernels are measured against computes what plain PyTorch does."""

import pytest
import torch
from dense_mixing import dense_mixing


@pytest.mark.parametrize("tokens, channels", [(24, 40), (40, 12)], ids=["by sample", "copied"])
@pytest.mark.parametrize("compiled", [False, True])
def test_its_results_and_gradients_are_those_of_plain_pytorch(tokens, channels, compiled):
    torch.manual_seed(0)
    shapes = [(3, tokens, channels), (tokens, tokens), (tokens,)]
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    leaves = [part.requires_grad_() for part in (x, weight, bias)]
    dy = torch.randn_like(x)
    mix = torch.compile(dense_mixing, fullgraph=True, backend="aot_eager")
    y = (mix if compiled else dense_mixing)(*leaves)
    wanted = weight.tril() @ x + bias[:, None]
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    torch.testing.assert_close(found, [wanted, *torch.autograd.grad(wanted, leaves, dy)])


def test_under_autocast_it_rounds_to_16_bits_and_its_parameters_have_gradients_in_fp32():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 16, 32), torch.randn(16, 16), torch.randn(16)
    leaves = [part.requires_grad_() for part in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        y = dense_mixing(*leaves)
    wanted = weight.tril() @ x + bias[:, None]
    dy = torch.randn_like(x)
    exact = torch.autograd.grad(wanted, leaves, dy)
    found = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    assert y.dtype == torch.bfloat16 and all(part.dtype == torch.float32 for part in found)
    for ours, theirs in zip([y, *found], [wanted, *exact], strict=True):
        assert (ours - theirs).norm() < 5e-3 * theirs.norm()
