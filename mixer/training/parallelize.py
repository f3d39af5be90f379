"""From a model to what is trained: recomputation, compilation, and DDP or FSDP around them."""

from functools import partial

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PreTrainedModel

from mixer.distributed.world import World
from mixer.training.compile import compile_objective, compiled
from mixer.training.config import RunConfig
from mixer.training.objective import build_objective
from mixer.training.optim import build_optimizer


def parallelize(
    model: PreTrainedModel, run: RunConfig, world: World
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """The model with its loss (see Objective) ready to train on all processes, and its optimizer.

    The model itself is changed: it moves to the device, and under FSDP its parameters become
    shards.
    """
    train, accelerator = run.train, world.accelerator
    shape = (train.batch_size, run.model.max_position_embeddings)
    set_recompute(model, train.recompute)
    processes = dist.group.WORLD if world.size > 1 else None
    objective = build_objective(model, run, processes).to(world.device).train()
    is_compiled = compile_objective(objective, train, shape, world)
    compile = partial(compiled, graphs=False) if is_compiled and not world.is_sharded else None
    optimizer = build_optimizer(model, run.optim, processes, compile)
    # DDP or FSDP, and autocast. FSDP replaces the parameters, also those in the optimizer.
    parallel, optimizer = accelerator.prepare(objective, optimizer)
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        _settle_buckets(parallel, world.device, shape)
    return parallel, optimizer


def _settle_buckets(parallel: nn.Module, device: torch.device, shape: tuple[int, int]) -> None:
    """Makes DDP choose its final gradient buckets, by a backward pass whose gradients are dropped.

    DDP sums gradients bucket by bucket, and lays the buckets out anew after its first backward
    pass. With three or more processes another layout means another order of summing. Without this
    call the first step after a resume would differ in its last bits from the same step of an
    uninterrupted run. `shape` is that of a micro-batch, (batch, tokens).
    """
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    parallel(tokens, tokens).sum().backward()
    parallel.zero_grad(set_to_none=True)


def set_recompute(model: PreTrainedModel, what: str) -> None:
    """Sets what the backward pass computes again instead of keeping it in memory (selective
    activation recomputation, arXiv 2205.05198).

    With A = batch x tokens x hidden_size numbers of the autocast type, a compiled block keeps for
    its backward pass

        A    its input, for both residual and norm
        A    the output of the first norm, an operand of the mixing's weight gradient
        A    the residual stream after mixing, the input of the second norm
        A    the output of the second norm, an operand of up_proj's weight gradient
        4 A  the output of up_proj, the input of the GELU
        4 A  the output of the GELU, an operand of down_proj's weight gradient

    and small tensors: the norms' statistics, and the packed and cast weights. "none" keeps all
    12 A. "activation" computes the GELU again and keeps 8 A. "block" keeps only the block's input,
    A, and computes the whole block again. Without the compiler, autocast also keeps the inputs of
    the norms in fp32.
    """
    if what == "activation":
        for module in model.modules():
            if hasattr(module, "recompute_activation"):
                module.recompute_activation = True
    if what == "block":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # This undoes a hook that transformers adds for adapters on a frozen model. torch 2.11
        # cannot compile it where there are no gradients.
        model.disable_input_require_grads()
