"""GELU, x Phi(x) with Phi the normal distribution function (arXiv 1606.08415): torch's own, and a
cheaper form for compiled code.

Compiled for a GPU, torch's form is limited by arithmetic rather than memory: the error function is
a long polynomial, and the derivative needs an exponential besides. For 16-bit types a shorter
formula of the error function is accurate enough (Abramowitz and Stegun, Handbook of Mathematical
Functions, 7.1.26), and its exponential is the one that the derivative needs. Phi is off by at most
3e-7, while the result is rounded to 8 or 11 bits. Each operation counts: dev/LOG.md, "GELU in fewer
operations".
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
    bell, tail = bell_and_tail(at)
    y = at.relu() - at.abs() * tail
    if torch.is_grad_enabled():
        slope = torch.where(at < 0, tail, 1 - tail) + at * bell / math.sqrt(2 * math.pi)
        # The added term is zero, and gives y the derivative that we want: autograd's own would
        # compute the polynomial again. An autograd.Function could do the same, but inside of one
        # the compiler of torch 2.11 ignores activation checkpointing. Of wide - at the compiler of
        # torch 2.13 makes tests for NaN and infinity, which this sum is spared.
        y = y + slope * (wide + -at)
    return y.to(x.dtype)


def bell_and_tail(x: Tensor) -> tuple[Tensor, Tensor]:
    """exp(-x^2 / 2) and Phi(-|x|), of x in fp32, in as few operations as possible: a power of two
    is one, an exponential nine, and the formula's factor 1/2 is in its coefficients.
    """
    bell = torch.exp2(x * x * (-0.5 / math.log(2)))
    denominator = 1 + P / math.sqrt(2) * x.abs()
    t = torch.rsqrt(denominator * denominator)  # 1 / denominator, cheaper on a GPU than a division
    a1, a2, a3, a4, a5 = A1 / 2, A2 / 2, A3 / 2, A4 / 2, A5 / 2
    return bell, bell * (t * (a1 + t * (a2 + t * (a3 + t * (a4 + t * a5)))))
