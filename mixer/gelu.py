"""GELU, x Phi(x), where Phi is the normal distribution's (arXiv 1606.08415): torch's own, but cheaper where it is compiled.

Compiled for a GPU, torch's form waits for arithmetic, not for memory: the error function is a long polynomial, and the
derivative computes an exponential beside it. For types of 16 bits the error function of Abramowitz and Stegun (Handbook of
Mathematical Functions, 7.1.26) serves as well, and its exponential is the derivative's: Phi is off by at most 3e-7, while the
result is rounded to 8 or 11 bits.

It goes with every saved model (mixer/carried.py), so it imports nothing of the package.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

P = 0.3275911
A1, A2, A3, A4, A5 = 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), in x's dtype and shape."""
    if torch.compiler.is_compiling() and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return ShortGelu.apply(x)
    return F.gelu(x)


class ShortGelu(torch.autograd.Function):
    """By arithmetic in fp32 that is left to the compiler to fuse: without it, each operation would be a kernel."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        distribution, _ = normal(wide)
        return (wide * distribution).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        distribution, density = normal(wide)
        return (dy.float() * (distribution + wide * density)).to(x.dtype)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The standard normal distribution at x (fp32) and its density."""
    exponential = torch.exp(-0.5 * x * x)
    t = 1 / (1 + P / math.sqrt(2) * x.abs())
    tail = 0.5 * exponential * t * (A1 + t * (A2 + t * (A3 + t * (A4 + t * A5))))  # of the distribution below -|x|
    return torch.where(x < 0, tail, 1 - tail), exponential / math.sqrt(2 * math.pi)
