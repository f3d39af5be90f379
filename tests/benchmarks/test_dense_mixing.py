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
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    dy = torch.randn_like(x)
    mix = torch.compile(dense_mixing, fullgraph=True, backend="aot_eager")
    y = (mix if compiled else dense_mixing)(*leaves)
    results = [y, *torch.autograd.grad(y, leaves, dy)]
    exact = weight.tril() @ x + bias[:, None]
    expected = [exact, *torch.autograd.grad(exact, leaves, dy)]
    torch.testing.assert_close(results, expected)


def test_under_autocast_it_rounds_to_16_bits_and_its_parameters_have_gradients_in_fp32():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape) for shape in [(2, 16, 32), (16, 16), (16,)])
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        y = dense_mixing(*leaves)
    exact = weight.tril() @ x + bias[:, None]
    dy = torch.randn_like(x)
    expected = [exact, *torch.autograd.grad(exact, leaves, dy)]
    gradients = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    assert y.dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    for ours, theirs in zip([y, *gradients], expected, strict=True):
        assert (ours - theirs).norm() < 5e-3 * theirs.norm()
