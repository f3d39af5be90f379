"""The mixing weights of keyed mixing as its kernels read them: a packed triangle, or strips, from
which a tile of a weight by lag is cut. keyed.py makes them, and keyed_kernels.py reads them.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixer.ops.plain import falling

SHIFTS = 64
LARGEST_TILE = 128  # rows and columns
AROUND = 2 * LARGEST_TILE  # numbers of a strip beside its lags, for tiles that reach past them


class Weights(NamedTuple):
    """Mixing weights of a number of tokens."""

    tiles: Tensor  # (heads, tokens, tokens), or strips (heads, 2, SHIFTS, length)
    rest: Tensor | None = None  # (heads, tokens) float32: a number for each query, with strips
    falls: Tensor | None = None  # (heads,) float32: by how much logarithms fall from lag to lag


def weights_of(mixing: Tensor, decay: Tensor | None, tokens: int, dtype: torch.dtype) -> Weights:
    """Of the first tokens, without gradients: of a weight (heads, 1, context, context), or of lags
    (heads, 1, context) and decay (heads,).
    """
    mixing = mixing.detach()
    if mixing.dim() == 3:
        return strips_of(mixing, decay, tokens, dtype)
    return Weights(mixing[:, 0, :tokens, :tokens].tril().to(dtype).contiguous())


def strips_of(lags: Tensor, decay: Tensor | None, tokens: int, dtype: torch.dtype) -> Weights:
    """Strips of lags (heads, 1, context) and decay (heads,), in memory of the context's size, for
    the first tokens of

        w[i, j] = lags[i - j] + exp(-(i - j) * decay) / sum over l <= i of exp(-l * decay)

    All tiles on a block diagonal have the same lags, and are cut from one vector. A tile's row r is
    the vector from number r on, backwards. To be read in whole lines of the cache each row must
    begin at a multiple of a tile's width, so a strip has the vector SHIFTS times, each shifted by
    one more.

    The second term is not by lag alone. For long sums it nearly is: the sum's limit, 1 / (1 -
    exp(-decay)), is put into the vector. What is left is a product of a number for i and one for j,
    exp(-(i + 1) * decay) / sum * exp(-(i - j) * decay), whatever the decay is, 0 included.

    Returns:

    - (heads, 2, SHIFTS, length) in `dtype`: the vector backwards, [0, q, u] is its number length -
      AROUND + SHIFTS - 1 - u - q, and forwards, [1, q, u] is its number u + q - SHIFTS + 1 -
      AROUND. It is zero where there is no such lag.
    - (heads, tokens) float32: the number of each query i, exp(-(i + 1 + i % LARGEST_TILE) * decay)
      over the sum. It is for a j from the last multiple of LARGEST_TILE up to i on.
    - (heads,) float32: decay, for powers of 2.
    """
    vector = lags[:, 0, :tokens].float()
    if decay is None:
        rest = vector.new_zeros(vector.shape)
        falls = vector.new_zeros(vector.shape[:1])
    else:
        decay = decay.detach().float()
        by_lag, sums = falling(decay, tokens)
        vector = vector - torch.expm1(-decay)[:, None] * by_lag
        position = torch.arange(tokens, device=decay.device)
        exponent = -decay[:, None] * (position + 1 + position % LARGEST_TILE)
        rest = exponent.exp() / sums
        falls = decay / math.log(2)
    vector = vector.to(dtype)
    length = (tokens // LARGEST_TILE + 1) * LARGEST_TILE + 2 * AROUND
    zeros_after = length - AROUND - tokens
    zeros_before = AROUND + SHIFTS - 1
    backwards = F.pad(vector.flip(-1), (zeros_after + SHIFTS, AROUND - 1))
    forwards = F.pad(vector, (zeros_before, zeros_after))
    directions = torch.stack([backwards, forwards], 1)  # (heads, 2, length + SHIFTS - 1)
    return Weights(directions.unfold(-1, length, 1).contiguous(), rest, falls)
