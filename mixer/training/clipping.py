"""Clipping the gradient's norm, without a pass over the gradients of its own."""

import torch
from torch import Tensor

from mixer.distributed.shards import whole
from mixer.optimizers.chained import ChainedOptimizer


def gradient_norm(optimizer: ChainedOptimizer) -> Tensor:
    """The norm of all gradients, also where they are sharded over the processes.

    Parts of the optimizer that have a `gradient_norm` of their own find it cheaper.
    """
    norms = []
    for part in optimizer.parts:
        parameters = [weight for group in part.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        if gradients and hasattr(part, "gradient_norm"):
            norms.append(part.gradient_norm())
        elif gradients:
            norms.append(whole(torch.nn.utils.get_total_norm(gradients)))
    return torch.linalg.vector_norm(torch.stack(norms))


def clip(optimizer: torch.optim.Optimizer, norm: Tensor, limit: float) -> None:
    """Makes the optimizer's next step one with gradients whose norm is `limit` at most; 0 is no
    limit.

    The optimizer divides the gradients as it reads them, by what torch's optimizers call
    `grad_scale`. torch.nn.utils.clip_grad_norm_ would read and write all of them once more.
    """
    optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0) if limit else None
