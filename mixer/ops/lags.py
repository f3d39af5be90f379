"""Mixing weights by lag: W[i, j] = lags[i - j], one number for each distance of two tokens, where a
full weight has one for each pair of positions (arXiv 2605.06683).

This file is copied beside every saved model, so it imports from its own folder alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The rows of a large matrix are worked on in parts of at least so many rows, at most so many parts.
# A part has only the columns up to its last row, so that little of the upper triangle is read.
ROWS, PARTS = 512, 8
# The rows of a part are summed in so many groups, each by threads of its own.
GROUPS = 8


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
        return toeplitz_rows(lags, tokens, tokens)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        sums = diagonal_sums(gradient)
        return F.pad(sums, (0, ctx.context - sums.shape[-1])), None


def toeplitz_rows(lags: Tensor, rows: int, columns: int) -> Tensor:
    """The last `rows` of the first `columns` rows of toeplitz(lags): (..., context) -> (..., rows,
    columns).
    """
    position = torch.arange(columns, device=lags.device)
    return lags_at(lags, position[columns - rows :, None] - position)


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


def row_parts(context: int) -> list[tuple[int, int]]:
    """The first row of each part, and the row after its last."""
    parts = min(max(context // ROWS, 1), PARTS)
    ends = [context * part // parts for part in range(parts + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def diagonal_sums(matrix: Tensor) -> Tensor:
    """Sums along the diagonals on and below the main one: (..., context, context) -> (...,
    context). Entry l is the sum over i of matrix[..., i, i - l].
    """
    context = matrix.shape[-1]
    flat = matrix.flatten(-2)
    place = torch.arange(context, device=matrix.device)
    # Row 0 has the diagonal of lag 0 alone.
    total = F.pad(matrix[..., 0, :1], (0, context - 1))
    for first, end in row_parts(context):
        first = max(first, 1)
        # A step of context + 1 numbers goes down a diagonal. So in rows of that many numbers each
        # diagonal is a column: neighbours in memory are summed side by side. A column's lag is
        # `lag`; the start of a row may be an end of the one before, above the diagonal.
        begin = first * (context + 1) - end
        skewed = flat[..., begin : begin + (end - first) * (context + 1)]
        skewed = skewed.unflatten(-1, (end - first, context + 1))[..., 1 : end + 1]
        lag = end - 1 - place[:end]
        live = torch.where(lag <= place[first:end, None], skewed, 0)
        for sums in column_sums(live).unbind(-2):
            total = total + F.pad(sums.flip(-1), (0, context - end))
    return total


def column_sums(matrix: Tensor) -> Tensor:
    """Sums of the columns by groups of rows: (..., rows, columns) -> (..., GROUPS, columns).

    A sum over all rows at once would be compiled into two kernels, of which the second is tiny.
    """
    if missing := -matrix.shape[-2] % GROUPS:
        matrix = F.pad(matrix, (0, 0, 0, missing))
    return matrix.unflatten(-2, (GROUPS, -1)).sum(-2)
