"""Clipping the gradient's norm, without a pass over the gradients of its own."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mixer.distributed.shards import whole


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients, also where they are sharded over the processes."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return whole(torch.nn.utils.get_total_norm(gradients))


def clip(optimizer: torch.optim.Optimizer, norm: Tensor, limit: float) -> None:
    """Makes the optimizer's next step one with gradients whose norm is `limit` at most; 0 is no
    limit.

    The optimizer divides the gradients as it reads them, by what torch's optimizers call
    `grad_scale`. torch.nn.utils.clip_grad_norm_ would read and write all of them once more.
    """
    optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0) if limit else None
