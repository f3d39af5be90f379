"""Finds weights and optimizer state that are not finite, so that no checkpoint ever holds them."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """The optimizer's state as (PARAMETER/KEY, parameter, value), whichever keys it has."""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}/{key}", parameter, value


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that hold NaN or infinity. Waits for the device.

    If all are finite, which is nearly always, this costs one reading of their memory: the largest
    absolute value of all of them is NaN or infinity where one of them is.
    """
    floating = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel()
    }
    if torch.nn.utils.get_total_norm(floating.values(), math.inf).isfinite():
        return []
    return [name for name, tensor in floating.items() if not tensor.isfinite().all()]
