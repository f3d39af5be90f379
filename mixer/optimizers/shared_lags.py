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

from mixer.ops.lags import diagonal_sums


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
