"""A model in shards, of which each process holds one: FSDP, without the whole model in any process
but the main one.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mixer.distributed.world import World


def shard(
    root: nn.Module, units: Sequence[nn.Module], last: Sequence[nn.Module], world: World
) -> None:
    """Turns the parameters into shards on the processes' devices, of the values that the main
    process has; on the others they may be on the meta device.

    Each unit is gathered when it computes, and then dropped, only one at a time. What comes `last`,
    and what the root has beside all these, stays from the forward to the backward pass. One unit at
    a time is whole on a device now, too, and leaves the main process's memory.

    Args:
        last: modules that may have parameters in common; no others have.
    """
    plugin = world.accelerator.state.fsdp_plugin
    assert plugin is not None
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    reshard = plugin.reshard_after_forward
    for unit in units:
        receive([unit], world)
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    receive(last, world)
    fully_shard(list(last), mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    receive([root], world)
    fully_shard(root, mesh=mesh, mp_policy=policy)


@torch.no_grad()
def receive(modules: Iterable[nn.Module], world: World) -> None:
    """Moves modules to the device, but for what is in shards already, with the main process's
    parameters and buffers. Tied parameters stay tied.
    """
    received: dict[Tensor, Tensor] = {}
    for owner in chain.from_iterable(module.modules() for module in modules):
        tensors = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                continue
            if tensor not in received:
                source = tensor if world.is_main else torch.empty_like(tensor, device=world.device)
                value = source.detach().to(world.device).contiguous()
                dist.broadcast(value, 0)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                received[tensor] = value
            setattr(owner, name, received[tensor])
