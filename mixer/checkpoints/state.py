"""The tensors of a run's state: their names in a checkpoint, and whether they are finite, so that
no checkpoint ever holds a NaN or an infinity.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from mixer.common.errors import UserError


def held_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The weights and saved buffers by their names, and the optimizer's state as PARAMETER/KEY,
    whichever keys it has; under FSDP sharded, except for buffers and scalars. A tied weight comes
    once.

    Raises UserError for state that is not sharded like its parameter.
    """
    weights, state = dict(model.named_parameters()), {}
    for name, weight in weights.items():
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(weight, DTensor) and value.ndim and not isinstance(value, DTensor):
                raise UserError(
                    f"the optimizer's state {name}/{key} is not sharded like its parameter, so it "
                    "cannot be saved under FSDP; train without FSDP"
                )
            state[f"{name}/{key}"] = value
    saved = model.state_dict()
    return weights | {n: x for n, x in model.named_buffers() if n in saved} | state


def is_weight(name: str) -> bool:
    """Whether a name of `held_state` is a weight's or a buffer's."""
    return "/" not in name


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
