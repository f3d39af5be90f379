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
        return short_gelu(x)
    return F.gelu(x)


def short_gelu(x: Tensor) -> Tensor:
    """The same by arithmetic in fp32 that is left to the compiler to fuse: without it, each operation would be a kernel.

    An infinite x gives NaN, as it may with torch's own.
    """
    wide = x.float()
    at = wide.detach()
    distribution, density = normal(at)
    if not torch.is_grad_enabled():  # the slope below would be computed all the same, for a difference of zero
        return (at * distribution).to(x.dtype)
    # The value, with a slope of our own: autograd's would repeat the polynomial. Not an autograd.Function, inside of which
    # the compiler of torch 2.11 overlooks that a checkpoint wants things computed again.
    y = at * distribution + (distribution + at * density) * (wide - at)
    return y.to(x.dtype)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The standard normal distribution at x (fp32) and its density."""
    exponential = torch.exp(-0.5 * x * x)
    denominator = 1 + P / math.sqrt(2) * x.abs()
    t = torch.rsqrt(denominator * denominator)  # its reciprocal: cheaper on a GPU than a division
    tail = 0.5 * exponential * t * (A1 + t * (A2 + t * (A3 + t * (A4 + t * A5))))  # of the distribution below -|x|
    return torch.where(x < 0, tail, 1 - tail), exponential / math.sqrt(2 * math.pi)
