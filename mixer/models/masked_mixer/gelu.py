"""GELU, x Phi(x) with Phi the normal distribution function (arXiv 1606.08415): torch's own, and a
cheaper form for compiled code.

Compiled for a GPU, torch's form is limited by arithmetic rather than memory: the error function is
a long polynomial, and the derivative needs an exponential besides. For 16-bit types a shorter
formula of the error function is accurate enough (Abramowitz and Stegun, Handbook of Mathematical
Functions, 7.1.26), and its exponential is the one that the derivative needs. Phi is off by at most
3e-7, while the result is rounded to 8 or 11 bits.

This file is copied beside every saved model, so it imports nothing from the rest of the package.
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
    """x Phi(x) in x's dtype and shape, by arithmetic in fp32.

    Only for compiled code, where all of it becomes part of one kernel. An infinite x gives NaN, as
    it may in torch's own form.
    """
    wide = x.float()
    at = wide.detach()
    distribution, density = normal(at)
    if not torch.is_grad_enabled():  # the slope below would be computed for nothing
        return (at * distribution).to(x.dtype)
    # The second term is zero, and gives y the derivative that we want: autograd's own would compute
    # the polynomial again. An autograd.Function could do the same, but inside of one the compiler
    # of torch 2.11 ignores activation checkpointing.
    y = at * distribution + (distribution + at * density) * (wide - at)
    return y.to(x.dtype)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The standard normal distribution at x (fp32) and its density."""
    exponential = torch.exp(-0.5 * x * x)
    denominator = 1 + P / math.sqrt(2) * x.abs()
    t = torch.rsqrt(denominator * denominator)  # 1 / denominator, cheaper on a GPU than a division
    polynomial = A1 + t * (A2 + t * (A3 + t * (A4 + t * A5)))
    tail = 0.5 * exponential * t * polynomial  # Phi(-|x|)
    return torch.where(x < 0, tail, 1 - tail), exponential / math.sqrt(2 * math.pi)
