"""Linear layers and nonlinearities, which token mixing and MLPs share."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear, or several with the same input as one, whose outputs stand side by side. `parts`
    has the out_features of each, for an optimizer of whole matrices.
    """

    def __init__(self, in_features: int, *parts: int, bias: bool = True):
        super().__init__(in_features, sum(parts), bias)
        self.parts = parts


def in_autocast_type(x: Tensor) -> Tensor:
    """x in the autocast dtype of its device, or as it is without autocast, which leaves an
    embedding's output in float32: added to it, all that blocks compute would be, and norms and sums
    would move twice the bytes.
    """
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU (arXiv 2109.08668)."""
    return F.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), with Phi the normal distribution function (arXiv 1606.08415)."""
    if torch.compiler.is_compiling() and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return short_gelu(x)
    return F.gelu(x)


def short_gelu(x: Tensor) -> Tensor:
    """x Phi(x) in x's dtype and shape, by arithmetic in fp32 that is cheaper than torch's own.

    Compiled for a GPU, torch's form is limited by arithmetic rather than memory: the error function
    is a long polynomial, and the derivative needs an exponential besides. For 16-bit types a
    shorter formula is accurate enough (Abramowitz and Stegun, Handbook of Mathematical Functions,
    7.1.26), and its exponential is the one that the derivative needs. Phi is off by at most 3e-7,
    while the result is rounded to 8 or 11 bits. An infinite x gives NaN, as it may in torch's own
    form. Each operation counts: dev/LOG.md, "GELU in fewer operations".
    """
    wide = x.float()
    at = wide.detach()
    # exp(-x^2 / 2): a power of two is one operation, an exponential nine.
    bell = torch.exp2(at * at * (-0.5 / math.log(2)))
    denominator = 1 + 0.3275911 / math.sqrt(2) * at.abs()
    t = torch.rsqrt(denominator * denominator)  # 1 / denominator, cheaper on a GPU than a division
    factor = 0.0
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        factor = t * (coefficient / 2 + factor)
    tail = bell * factor  # Phi(-|x|)
    y = at.relu() - at.abs() * tail
    if torch.is_grad_enabled():
        slope = torch.where(at < 0, tail, 1 - tail) + at * bell / math.sqrt(2 * math.pi)
        # The added term is zero, and gives y the derivative that we want: autograd's own would
        # compute the polynomial again. An autograd.Function could do the same, but inside of one
        # the compiler of torch 2.11 ignores activation checkpointing. Of wide - at the compiler of
        # torch 2.13 makes tests for NaN and infinity, which this sum is spared.
        y = y + slope * (wide + -at)
    return y.to(x.dtype)
