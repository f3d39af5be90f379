"""Tensors that FSDP shards over the processes: the part held here, the whole, and back."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mixer.common.errors import UserError


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: its shard, or the tensor if not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from its shards. All processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_held(full: Tensor, like: nn.Parameter) -> Tensor:
    """`full`, of the parameter's shape, placed like the parameter: on its device, and sharded
    where the parameter is (each process then holds its rows, divided as torch.chunk does).

    Raises UserError for a parameter that is sharded in another way than FSDP's full sharding.
    """
    if not isinstance(like, DTensor):
        return full.to(like.device)
    if like.placements != (Shard(0),):
        raise UserError(
            f"parameters placed as {like.placements}; checkpoints support full sharding only, "
            "(Shard(dim=0),); launch with configs/accelerate/1x8_fsdp.yaml or 2x4_fsdp.yaml, or "
            "without FSDP"
        )
    size = -(-full.shape[0] // like.device_mesh.size())
    start = min(like.device_mesh.get_local_rank() * size, full.shape[0])
    own = full[start : start + size].contiguous().to(like.device)
    shape = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(own, like.device_mesh, like.placements, run_check=False, **shape)
