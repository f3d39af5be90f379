"""Mixing weights by lag: W[i, j] = lags[i - j], one number for each distance of two tokens, where a
full weight has one for each pair of positions (arXiv 2605.06683).

This file is copied beside every saved model, so it imports from its own folder alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def toeplitz(lags: Tensor, tokens: int) -> Tensor:
    """The weight of the first `tokens` tokens: (..., context) -> (..., tokens, tokens), zero above
    the diagonal. Its gradient is summed along the diagonals in a fixed order.
    """
    return _Toeplitz.apply(lags, tokens)


class _Toeplitz(torch.autograd.Function):
    """Autograd's own gradient would add each number to its lag by an atomic operation."""

    @staticmethod
    def forward(ctx, lags: Tensor, tokens: int) -> Tensor:
        ctx.context = lags.shape[-1]
        position = torch.arange(tokens, device=lags.device)
        return lags_at(lags, position[:, None] - position)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        sums = diagonal_sums(gradient)
        return F.pad(sums, (0, ctx.context - sums.shape[-1])), None


def lags_at(lags: Tensor, lag: Tensor) -> Tensor:
    """lags[..., lag], zero where a lag is negative: (..., context) -> (..., *shape of lag)."""
    return torch.where(lag >= 0, lags[..., lag.clamp(min=0)], 0)


def falling(decay: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """exp(-lag * decay) by lag, and its sums over the lags up to each: (heads,) -> two of (heads,
    tokens). So toeplitz(first) / second[..., None] has rows that add up to 1: means of the tokens
    so far, in which nearer tokens count for more.
    """
    by_lag = (-torch.arange(tokens, device=decay.device) * decay[:, None]).exp()
    return by_lag, by_lag.cumsum(-1)


def weight_by_lag(lags: Tensor, decay: Tensor | None, tokens: int) -> Tensor:
    """The weight of the first tokens: lags (heads, taps, context) and decay (heads,) -> (heads,
    taps, tokens, tokens), zero above the diagonal. With decay, which keyed mixing has, a mean of
    the tokens so far is added, in which nearer ones count for more.
    """
    weight = toeplitz(lags, tokens)
    if decay is None:
        return weight
    by_lag, sums = falling(decay, tokens)
    return weight + (toeplitz(by_lag, tokens) / sums[..., None])[:, None]


def rows_by_lag(lags: Tensor, decay: Tensor | None, positions: Tensor, length: int) -> Tensor:
    """Rows of a weight by lag, for `length` tokens: lags (heads, taps, context), decay (heads,) and
    positions (batch or 1, new) -> (batch or 1, heads, taps, new, length), zero for later tokens.
    """
    # (batch or 1, new, length)
    lag = positions[..., None] - torch.arange(length, device=lags.device)
    rows = lags_at(lags, lag)  # (heads, taps, batch or 1, new, length)
    if decay is not None:
        by_lag, sums = falling(decay, lags.shape[-1])
        rows = rows + (lags_at(by_lag, lag) / sums[:, positions][..., None])[:, None]
    return rows.permute(2, 0, 1, 3, 4)


def diagonal_sums(matrix: Tensor) -> Tensor:
    """Sums along the diagonals on and below the main one: (..., context, context) -> (...,
    context). Entry l is the sum over i of matrix[..., i, i - l].
    """
    context = matrix.shape[-1]
    # A step of context + 1 numbers goes down a diagonal, so in rows of so many numbers each
    # diagonal is a column: neighbours in memory are summed side by side. Column 0 is the main
    # diagonal but for its last number. Column c is the diagonal of lag context + 1 - c, behind the
    # end of one above the main diagonal.
    skewed = matrix.flatten(-2)[..., :-1].unflatten(-1, (context - 1, context + 1))
    place = torch.arange(context + 1, device=matrix.device)
    live = (place == 0) | (place[: context - 1, None] + place >= context)
    sums = torch.where(live, skewed, 0).sum(-2)
    return torch.cat([sums[..., :1] + matrix[..., -1, -1:], sums[..., 2:].flip(-1)], -1)
