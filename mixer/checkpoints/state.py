"""The tensors of a run's state: their names in a checkpoint, their parts on each process, and
whether they are finite, so that no checkpoint ever holds a NaN or an infinity.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def held_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The weights and saved buffers by their names, and the optimizer's state as PARAMETER/KEY,
    whichever keys it has. Under FSDP they are sharded, except for buffers and scalars. A tied
    weight comes once.
    """
    weights, saved = dict(model.named_parameters()), model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    state = {
        f"{name}/{key}": value
        for name, weight in weights.items()
        for key, value in optimizer.state.get(weight, {}).items()
    }
    return weights | buffers | state


def is_weight(name: str) -> bool:
    """Whether a name of `held_state` is a weight's or a buffer's."""
    return "/" not in name


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: its shard, or the tensor if not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from its shards. All processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state that the optimizer's first step would make, by a step that is skipped on the
    device (`found_inf` is 1) and so changes nothing.
    """
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in parameters:
        weight.grad = torch.zeros_like(weight)
    optimizer.found_inf = torch.ones((), device=parameters[0].device)
    optimizer.step()
    optimizer.found_inf = None
    optimizer.zero_grad()


@torch.no_grad()
def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that hold NaN or infinity. Waits for the device."""
    floating = {n: x for n, x in tensors.items() if x.is_floating_point() and x.numel()}
    # The largest magnitude of all, by one kernel for many tensors: nearly always all are finite.
    if not floating or get_total_norm(floating.values(), math.inf).isfinite():
        return []
    return [name for name, tensor in floating.items() if not tensor.isfinite().all()]
