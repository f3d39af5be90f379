"""Shared lags: a mixing weight also learns as the sum of itself and a Toeplitz matrix would.

A mixing weight W[i, j] gets a gradient from one place of each sample, where a linear layer's weight
gets one from every token. A lag's weight a[i - j], shared by all places, does hear from all of
them. Training V and a with W = V + toeplitz(a) is the same functions, learned faster. V and a act
through W alone, so nothing but the optimizer needs to know: the gradient of a is the sum of W's
gradient along each diagonal, and an update of a is added to W along the diagonals. `a` itself never
has to be kept.

The functions here work on all mixing weights of a model at once, in a fixed order of summation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The rows of a large matrix are worked on in parts of at least so many rows, at most so many parts.
# A part has only the columns up to its last row, so that little of the upper triangle is read.
ROWS, PARTS = 512, 8
# The rows of a part are summed in so many groups, each by threads of its own.
GROUPS = 8


def row_parts(context: int) -> list[tuple[int, int]]:
    """The first row of each part, and the row after its last."""
    parts = min(max(context // ROWS, 1), PARTS)
    ends = [context * part // parts for part in range(parts + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def diagonal_sums(matrix: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Sums along the diagonals on and below the main one, (..., context, context) -> (...,
    context), and tensors whose numbers add up to the sum of the squares there.

    Entry l of the sums is the sum over i of matrix[..., i, i - l].
    """
    context = matrix.shape[-1]
    flat = matrix.flatten(-2)
    place = torch.arange(context, device=matrix.device)
    corner = matrix[..., 0, :1]  # row 0 has the diagonal of lag 0 alone
    total, squares = F.pad(corner, (0, context - 1)), [corner.square()]
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
        squares.append(column_sums(live.square()))
    return total, squares


def column_sums(matrix: Tensor) -> Tensor:
    """Sums of the columns by groups of rows: (..., rows, columns) -> (..., GROUPS, columns).

    A sum over all rows at once would be compiled into two kernels, of which the second is tiny.
    """
    if missing := -matrix.shape[-2] % GROUPS:
        matrix = F.pad(matrix, (0, 0, 0, missing))
    return matrix.unflatten(-2, (GROUPS, -1)).sum(-2)


def toeplitz_rows(lags: Tensor, rows: int, columns: int) -> Tensor:
    """The last `rows` of the first `columns` rows of toeplitz(lags), whose entry [i, j] is
    lags[i - j], and zero above the diagonal: (..., context) -> (..., rows, columns).
    """
    place = torch.arange(columns, device=lags.device)
    lag = place[columns - rows :, None] - place  # (row, column)
    return torch.where(lag >= 0, lags[..., lag.clamp(min=0)], 0)


def gradient_sums(gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What one reading of the gradients of mixing weights, (heads, taps, context, context) each,
    gives: their sums along the diagonals, (heads, taps, context) each, and tensors whose numbers
    add up to the sum of all squares.
    """
    found = [diagonal_sums(gradient) for gradient in gradients]
    return [sums for sums, _ in found], [part for _, parts in found for part in parts]


def lag_changes(
    sums: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    numbers: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> list[Tensor]:
    """AdamW's update of the lags (arXiv 1711.05101, without weight decay): what is to be added to
    the weights along their diagonals, (heads, taps, context) each.

    Args:
        sums: of the weights' gradients along the diagonals, (heads, taps, context) each.
        first_moments, second_moments: of the lags' gradients, likewise; updated.
        numbers: as those of `update_rows` (triangular_adamw.py), with the lags' learning rate.
    """
    beta1, beta2 = betas
    changes = []
    tensors = zip(sums, first_moments, second_moments, strict=True)
    for place, (gradient, first, second) in enumerate(tensors):
        rate, root, _, skip, scale = numbers[place].unbind()
        gradient, skipped = gradient / scale, skip > 0
        first.copy_(torch.where(skipped, first, torch.lerp(first, gradient, 1 - beta1)))
        second.copy_(torch.where(skipped, second, beta2 * second + (1 - beta2) * gradient.square()))
        change = -rate * first / (second.sqrt() / root + eps)
        changes.append(torch.where(skipped, 0, change))
    return changes
