"""The engine that runs the model on all processes: accelerate with DDP or FSDP."""

import os
from collections.abc import Mapping

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    str_to_bool,
)
from torch import nn

from mixer.common.errors import UserError
from mixer.common.ranks import is_launched


def build_accelerator(precision: str) -> Accelerator:
    """accelerate as its launcher set it up: one process, DDP or FSDP, on one host or several.

    precision: "no" (fp32), "fp16" or "bf16". Precision, accumulation and compiling are the run's to
    set: what the launcher's environment says of them is not used. Raises UserError for version 1 of
    FSDP, and for parameters in the host's memory.
    """
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if sharded:
        _check_fsdp(os.environ)
    # Gradients stay in the buckets in which DDP sums them; otherwise each step copies them back.
    in_buckets = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    # accelerate takes processes of torchrun on a CPU for runs of their own, unless it is told.
    on_cpu = is_launched() and not torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
        kwargs_handlers=[in_buckets],
    )
    if sharded and accelerator.distributed_type == DistributedType.MULTI_CPU:
        _shard_on_cpu(accelerator, precision)
    if accelerator.distributed_type == DistributedType.FSDP and precision != "no":
        plugin = accelerator.state.fsdp_plugin
        # Gradients are summed in fp32, as in DDP; accelerate would sum them in the compute type.
        plugin.mixed_precision_policy = type(plugin.mixed_precision_policy)(
            param_dtype=plugin.mixed_precision_policy.param_dtype,
            reduce_dtype=torch.float32,
            output_dtype=torch.float32,
        )
    return accelerator


def _check_fsdp(environment: Mapping[str, str]) -> None:
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(
            f"FSDP version {version} was asked for; allowed: 2; set fsdp_version: 2, as "
            "configs/accelerate/1x8_fsdp.yaml does"
        )
    offload = environment.get("FSDP_OFFLOAD_PARAMS", "false")
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


def settle_buckets(parallel: nn.Module, accelerator: Accelerator, shape: tuple[int, int]) -> None:
    """Makes DDP choose its final gradient buckets, by a backward pass whose gradients are dropped.

    DDP sums gradients bucket by bucket, and lays the buckets out anew after its first backward
    pass. With three or more processes another layout means another order of summing. Without this
    call the first step after a resume would differ in its last bits from the same step of an
    uninterrupted run. `shape` is that of a micro-batch, (batch, tokens).
    """
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        tokens = torch.zeros(shape, dtype=torch.int64, device=accelerator.device)
        parallel(tokens, tokens).sum().backward()
        parallel.zero_grad(set_to_none=True)
