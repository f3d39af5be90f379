"""From a model to what is trained: recomputation, compilation, and DDP or FSDP around them."""

import importlib.util
from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PreTrainedModel

from mixer.common.errors import UserError
from mixer.distributed.world import World
from mixer.training.compile import compile_objective, optimizer_compiler
from mixer.training.config import RunConfig, TrainConfig
from mixer.training.objective import build_objective
from mixer.training.optim import build_optimizer

COMPILES_FROM = (7, 0)  # compute capability, of Triton 3.2 to 3.7 (dev/LOG.md)


@dataclass(frozen=True)
class Devices:
    """What the choice depends on beside the settings, the same on all processes."""

    type: str  # cuda or cpu
    capability: tuple[int, int] = (0, 0)  # of the oldest GPU
    has_triton: bool = False
    is_sharded: bool = False  # FSDP


@dataclass(frozen=True)
class Compilation:
    """How the model is compiled (no, blocks or model), whether as CUDA graphs, and a line about
    what was auto, empty on a CPU.
    """

    how: str
    graphs: bool
    line: str = ""


def find_devices(world: World) -> Devices:
    """All processes must call this together."""
    if world.device.type != "cuda":
        return Devices(world.device.type, is_sharded=world.is_sharded)
    capabilities = world.gather(torch.cuda.get_device_capability(world.device))
    triton = all(world.gather(importlib.util.find_spec("triton") is not None))
    return Devices("cuda", min(capabilities), triton, world.is_sharded)


def settle_compilation(train: TrainConfig, devices: Devices) -> Compilation:
    """The settings as they are given, and for auto what can run here.

    Raises UserError for CUDA graphs that were asked for and cannot be had.
    """
    on_gpu, how, said = devices.type == "cuda", train.compile, []
    if how == "auto":
        obstacle = _first(
            (not on_gpu, "it pays on GPUs"),
            (devices.capability < COMPILES_FROM, "Triton needs compute capability 7.0"),
            (not devices.has_triton, "Triton is not installed"),
        )
        how = "no" if obstacle else "blocks"
        said.append(f"train.compile={how}" + f" ({obstacle})" * bool(obstacle))
    obstacle = _first(
        (not on_gpu, "they are for GPUs"),
        (devices.is_sharded, "FSDP moves the weights"),
        (how == "no", "they are made of what is compiled"),
        (
            train.gradient_accumulation_steps > 1,
            "each backward pass would overwrite the gradients of the one before",
        ),
        (train.recompute == "block", "blocks that are computed again cannot be recorded"),
    )
    if train.cuda_graphs == "true" and obstacle:
        raise UserError(
            f"train.cuda_graphs = true cannot be had with these settings and devices: {obstacle}; "
            "allowed here: auto, false"
        )
    graphs = train.cuda_graphs != "false" and not obstacle
    if train.cuda_graphs == "auto":
        said.append(f"train.cuda_graphs={str(graphs).lower()}" + f" ({obstacle})" * bool(obstacle))
    return Compilation(how, graphs, f"auto: {', '.join(said)}" if said and on_gpu else "")


def _first(*cases: tuple[bool, str]) -> str:
    """The text of the first case that holds; empty if none does."""
    return next((text for holds, text in cases if holds), "")


def parallelize(
    model: PreTrainedModel, run: RunConfig, compilation: Compilation, world: World
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
    if compilation.line:
        world.say(compilation.line)
    how, graphs = compilation.how, compilation.graphs
    is_compiled = compile_objective(objective, how, graphs, shape, world)
    if graphs and not is_compiled and train.cuda_graphs == "auto":
        is_compiled = compile_objective(objective, how, False, shape, world)
    faster = None
    if is_compiled and not world.is_sharded:
        faster = optimizer_compiler(model, run.optim, world)
    optimizer = build_optimizer(model, run.optim, processes, faster)
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
