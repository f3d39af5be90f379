"""The processes of a run: accelerate's engine around the model, and what the processes tell each
other beside it.
"""

import os
import socket
import sys
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mixer.common.errors import UserError, first_line

LOST_CONTACT = (
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited or there was a network error",
)
QUIET_SECONDS = 1.0  # how long a process that fails waits to hear that another one failed first


def build_accelerator(precision: str) -> Accelerator:
    """accelerate as its launcher was told: one process, DDP or FSDP, on this host or several."""
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if sharded and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError(
            f"FSDP version {os.environ.get('FSDP_VERSION', '1')} was asked for; allowed: 2; set fsdp_version: 2, as "
            "configs/accelerate/1x8_fsdp.yaml does"
        )
    # Gradients stay in the buckets that DDP sums them in, or each step would copy all of them back.
    in_buckets = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[in_buckets])
    if sharded and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate keeps FSDP for GPUs, but it works over gloo too: what the tests on a CPU shard
        # is what GPUs will.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        for state in (accelerator.state, PartialState()):  # as accelerate does it for GPUs
            state.distributed_type = DistributedType.FSDP
        if precision != "no":
            accelerator.state.fsdp_plugin.set_mixed_precision(precision)
    if accelerator.distributed_type == DistributedType.FSDP and precision != "no":
        policy = accelerator.state.fsdp_plugin.mixed_precision_policy
        # Gradients are summed in fp32, as DDP does; accelerate's choice would be the compute type.
        accelerator.state.fsdp_plugin.mixed_precision_policy = type(policy)(
            param_dtype=policy.param_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    return accelerator


def settle_buckets(parallel: nn.Module, accelerator: Accelerator, shape: tuple[int, int]) -> None:
    """Makes DDP lay out its buckets of gradients for good, by a backward pass whose gradients are
    thrown away.

    DDP sums gradients bucket by bucket and lays these out anew after its first backward pass. With
    three processes or more, another layout is another order of summing: the first step of a resumed
    run would differ in its last bits from the same step of a run that nobody disturbed.
    """
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        tokens = torch.zeros(shape, dtype=torch.int64, device=accelerator.device)
        parallel(tokens, tokens).sum().backward()
        parallel.zero_grad(set_to_none=True)


def sum_by_copy_engines(parallel: nn.Module, accelerator: Accelerator, hosts: "Hosts") -> None:
    """Has DDP sum gradients by the GPUs' copy engines in place of NCCL; see
    mixer/distributed/copy_engines.py. Raises UserError where that cannot be; a single process has
    nothing to sum.
    """
    if hosts.processes == 1:
        return
    asked = "train.all_reduce = 'copy_engines'"
    names = hosts.gather(socket.gethostname())
    if accelerator.distributed_type != DistributedType.MULTI_GPU or len(set(names)) > 1:
        found = (
            "FSDP"
            if accelerator.distributed_type == DistributedType.FSDP
            else f"{accelerator.device.type} processes"
        )
        raise UserError(
            f"{asked} with {found} on {len(set(names))} host(s); allowed: DDP on GPUs of one host; set train.all_reduce=nccl"
        )
    try:
        from mixer.distributed.copy_engines import CopyEngineMean

        parallel.register_comm_hook(None, CopyEngineMean(accelerator.device).reduce)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{asked}, which this PyTorch or these GPUs cannot do: they must write to each other's memory, as over NVLink "
            f"({first_line(error)}); set train.all_reduce=nccl"
        ) from error


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor put together from all processes, which must all ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_held(full: Tensor, like: nn.Parameter) -> Tensor:
    """`full`, as this process holds it: its own rows where the parameter is sharded
    (torch.chunk's), on its device.
    """
    if not isinstance(like, DTensor):
        return full.to(like.device)
    if like.placements != (Shard(0),):
        raise UserError(
            f"parameters placed as {like.placements}: checkpoints know full sharding alone, (Shard(dim=0),); launch with "
            "configs/accelerate/1x8_fsdp.yaml or 2x4_fsdp.yaml, or without FSDP"
        )
    size = -(-full.shape[0] // like.device_mesh.size())
    start = min(like.device_mesh.get_local_rank() * size, full.shape[0])
    own = full[start : start + size].contiguous().to(like.device)
    return DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


class Hosts:
    """Small messages between the processes, over gloo: a GPU and the work queued there are not
    waited for.
    """

    def __init__(self, accelerator: Accelerator):
        self.processes, self.rank = accelerator.num_processes, accelerator.process_index
        self.group = dist.new_group(backend="gloo") if self.processes > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, for all of them."""
        if self.group is None:
            return [value]
        values = [None] * self.processes
        dist.all_gather_object(values, value, group=self.group)
        return values

    def of_main(self, value: Any) -> Any:
        """The main process's value, for all of them."""
        return self.gather(value)[0]

    def require_shared(self, what: str, seen: Any) -> None:
        """Raises UserError unless all processes have seen the same of a directory that all hosts
        are to share.
        """
        every = self.gather(seen)
        other = next((rank for rank, value in enumerate(every) if value != every[0]), None)
        if other is not None:
            raise UserError(
                f"{what} is not for process {other} what it is for process 0; allowed: one directory for all hosts, on a file "
                "system that they share; give its whole path where hosts start in different directories"
            )

    def begin_any(self, flag: bool) -> "PendingFlag":
        """Begins to ask whether any process has the flag; `result` of what is returned waits for
        the answer.
        """
        return PendingFlag(flag, self.group)


class PendingFlag:
    def __init__(self, flag: bool, group):
        self.flag = torch.tensor(int(flag))
        self.work = (
            dist.all_reduce(self.flag, group=group, async_op=True) if group is not None else None
        )

    def result(self) -> bool:
        if self.work is not None:
            self.work.wait()
        return bool(self.flag)


def leave_with_error(error: BaseException) -> None:
    """Ends this process at once with its error, unless another one failed before: that one's error
    is then the one to read.

    Peers of a process that ends see their connections break; what they would print hides the cause.
    A failing process takes its number in the launch's store before its connections close, so that
    number one is the cause.
    """
    rank, first = dist.get_rank(), _first_to_fail()
    if first:
        text = (
            f"error: {error}\n"
            if isinstance(error, UserError)
            else "".join(traceback.format_exception(error))
        )
        if any(sign in text for sign in LOST_CONTACT):
            text += "another process of this run ended without saying why: it was killed, as by the system for lack of memory\n"
        print(f"process {rank} failed:\n{text}", end="", file=sys.stderr)
    else:
        print(f"process {rank} ends, as another process failed first", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        2 if isinstance(error, UserError) else 1
    )  # destructors of broken connections could wait for ever


def _first_to_fail() -> bool:
    try:
        return dist.distributed_c10d._get_default_store().add("mixer/failed", 1) == 1
    except Exception:  # the process that holds the store is gone: it was first
        time.sleep(QUIET_SECONDS)
        return False
