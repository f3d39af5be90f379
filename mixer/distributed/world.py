"""The processes of a run, as one of them sees them: its device and rank, messages between them, and
what is printed.
"""

import dataclasses
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    str_to_bool,
)
from torch import Tensor

from mixer.common.errors import UserError, is_launched


class World:
    """What every part of a run is given beside its configuration.

    Attributes:
        accelerator: accelerate's engine, which wraps the model in DDP or FSDP.
        device: where this process computes.
        rank, size: which of how many processes this is. Rank 0 is the main process: it alone
            prints, and writes what belongs to the whole run.
        is_sharded: whether FSDP shards the model.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.device = accelerator, accelerator.device
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.is_main = self.rank == 0
        self.is_sharded = accelerator.distributed_type == DistributedType.FSDP
        # Messages go over gloo, so that no process waits for the work queued on its GPU.
        self.group = dist.new_group(backend="gloo") if self.size > 1 else None

    def say(self, line: str) -> None:
        """Prints a line, on the main process alone."""
        if not self.is_main:
            return
        try:
            print(line, flush=True)
        except BrokenPipeError:
            # The reader has ended, as `tee` does at Ctrl-C. The run continues, and still saves.
            sys.stdout = open(os.devnull, "w")

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank; every process gets them."""
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def of_main(self, value: Any) -> Any:
        """The value of the main process; every process gets it."""
        return self.gather(value)[0]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, computed on their devices."""
        return self.accelerator.reduce(tensor, "sum")

    def require_shared(self, what: str, seen: Any) -> None:
        """Raises UserError unless all processes see the same content in a directory that all hosts
        must share. `seen` identifies the content, `what` names the directory.
        """
        every = self.gather(seen)
        other = next((rank for rank, value in enumerate(every) if value != every[0]), None)
        if other is not None:
            raise UserError(
                f"{what} is not for process {other} what it is for process 0; allowed: one "
                "directory for all hosts, on a file system that they share; give its full path if "
                "hosts start in different directories"
            )


def build_accelerator(precision: str) -> Accelerator:
    """accelerate as its launcher set it up: one process, DDP or FSDP, on one host or several.

    precision: "no" (fp32), "fp16" or "bf16". The configuration decides precision, accumulation and
    compilation; the launcher's settings for them are ignored. Raises UserError for version 1 of
    FSDP, and for parameters in the host's memory.
    """
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if sharded:
        _check_fsdp()
    accelerator = Accelerator(
        # Without this, accelerate takes torchrun's processes on a CPU for separate runs.
        cpu=is_launched() and not torch.cuda.is_available(),
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
        # Gradients stay in the buckets in which DDP sums them: no step copies them back.
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if sharded and accelerator.distributed_type == DistributedType.MULTI_CPU:
        _shard_on_cpu(accelerator, precision)
    if accelerator.distributed_type == DistributedType.FSDP and precision != "no":
        plugin, fp32 = accelerator.state.fsdp_plugin, torch.float32
        # Gradients are summed in fp32, as in DDP; accelerate would sum them in the compute type.
        plugin.mixed_precision_policy = dataclasses.replace(
            plugin.mixed_precision_policy, reduce_dtype=fp32, output_dtype=fp32
        )
    return accelerator


def _check_fsdp() -> None:
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(
            f"FSDP version {version} was asked for; allowed: 2; set fsdp_version: 2, as "
            "configs/accelerate/1x8_fsdp.yaml does"
        )
    offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false")
    if str_to_bool(offload):
        raise UserError(
            f"fsdp_offload_params: {offload} was asked for, which keeps the parameters in the "
            "host's memory, where the optimizer's steps cannot be skipped; allowed: false. For "
            "less memory on the GPUs lower train.batch_size, or set train.recompute=block"
        )


def _shard_on_cpu(accelerator: Accelerator, precision: str) -> None:
    """Switches FSDP on, as accelerate does on GPUs only. FSDP works over gloo too, so that tests
    on a CPU shard the model in the same way as GPUs do.
    """
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    if precision != "no":
        accelerator.state.fsdp_plugin.set_mixed_precision(precision)
