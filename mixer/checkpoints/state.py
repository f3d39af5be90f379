"""The tensors of a run's state: their names in a checkpoint, and that they are finite, so that no
checkpoint ever holds a NaN or an infinity.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mixer.common.errors import UserError


def held_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The weights as PARAMETER, and the optimizer's state as PARAMETER/KEY, whichever keys it has;
    under FSDP sharded, except for scalars. A tied weight comes once.

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
    return weights | state


def is_weight(name: str) -> bool:
    """Whether a name of `held_state` is a weight's."""
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


class Look:
    """A look at tensors for NaN and infinity. It is queued on the device when it is made; only
    `not_finite` waits. Until then the tensors must not change.

    If all are finite, which is nearly always, this costs one pass over their memory.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        self.floating = {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and tensor.numel()
        }
        self.found = [_some_not_finite(group) for group in _by_device_and_type(self.floating)]

    def not_finite(self) -> list[str]:
        """The names of the tensors that hold NaN or infinity."""
        if not any(self.found):
            return []
        return [name for name, tensor in self.floating.items() if not tensor.isfinite().all()]


def _by_device_and_type(tensors: dict[str, Tensor]) -> Iterable[list[Tensor]]:
    groups = defaultdict(list)
    for tensor in tensors.values():
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()


@torch.no_grad()
def _some_not_finite(tensors: list[Tensor]) -> Tensor:
    """Whether one of these tensors, which are on one device and of one type, holds NaN or infinity:
    a single number on that device, not zero if so.

    fp32 is looked at by the few kernels with which GradScaler looks at gradients, and which would
    divide them by a scale: by 1 they stay what they are, to the bit. A norm or maximum of each
    tensor, and then of all, takes a sixth to a third of a short step.
    """
    if tensors[0].dtype != torch.float32:  # rare, and not all versions of those kernels take bf16
        return torch.stack([~tensor.isfinite().all() for tensor in tensors]).any()
    found = torch.zeros(1, device=tensors[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.ones_like(found))
    return found
