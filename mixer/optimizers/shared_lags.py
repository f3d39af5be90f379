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
from torch import Tensor

# Rows of a large matrix are worked on in so many parts. A part has only the columns up to its last
# row, so that little of the upper triangle is read or written.
PARTS, LARGE = 4, 2048


def row_parts(context: int) -> list[tuple[int, int]]:
    """The first row of each part, and the row after its last."""
    parts = PARTS if context >= LARGE else 1
    ends = [context * part // parts for part in range(parts + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def diagonal_sums(matrix: Tensor) -> Tensor:
    """Sums along the diagonals on and below the main one: (..., context, context) -> (...,
    context).

    Entry l of the result is the sum over i of matrix[..., i, i - l].
    """
    context = matrix.shape[-1]
    place = torch.arange(context, device=matrix.device)
    total = matrix.new_zeros(matrix.shape[:-1])
    for first, end in row_parts(context):
        rows = matrix[..., first:end, :end]
        column = place[first:end, None] - place[:end]  # (row, lag)
        picked = rows.gather(-1, column.clamp(min=0).expand(rows.shape))
        total[..., :end] += torch.where(column >= 0, picked, 0).sum(-2)
    return total


def add_toeplitz(matrix: Tensor, lags: Tensor) -> None:
    """Adds lags[..., i - j] to matrix[..., i, j] for all j <= i, in place.

    Args:
        matrix: (..., context, context).
        lags: (..., context).
    """
    context = lags.shape[-1]
    place = torch.arange(context, device=lags.device)
    for first, end in row_parts(context):
        lag = place[first:end, None] - place[:end]  # (row, column)
        matrix[..., first:end, :end].add_(torch.where(lag >= 0, lags[..., lag.clamp(min=0)], 0))


def update_lags(
    weights: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    steps: list[Tensor],
    rate: Tensor,
    betas: tuple[float, float],
    eps: float,
    skip: Tensor,
) -> None:
    """AdamW's update of the lags (arXiv 1711.05101, without weight decay), added to the weights in
    place.

    Args:
        weights, gradients: (heads, taps, context, context) each.
        first_moments, second_moments: of the lags' gradients, (heads, taps, context) each; updated.
        steps: the number of this step, from 1, a scalar tensor each.
        rate: the lags' learning rate, a scalar fp64 tensor.
        skip: with 1 nothing changes; gradients that are not finite do no harm then.
    """
    beta1, beta2 = betas
    for weight, gradient, first, second, step in zip(
        weights, gradients, first_moments, second_moments, steps, strict=True
    ):
        sums = diagonal_sums(gradient)
        skipped = skip > 0
        first.copy_(torch.where(skipped, first, torch.lerp(first, sums, 1 - beta1)))
        second.copy_(torch.where(skipped, second, beta2 * second + (1 - beta2) * sums.square()))
        denominator = (second / (1 - beta2 ** step.double())).sqrt() + eps
        change = torch.where(skipped, 0, -rate * first / (1 - beta1 ** step.double()) / denominator)
        add_toeplitz(weight, change)
