"""How a model computes a step: what is compiled, and replayed as CUDA graphs, and what the backward
pass computes again.
"""

import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mixer.common.errors import first_line
from mixer.distributed.world import World
from mixer.training.config import TrainConfig
from mixer.training.objective import Objective

SHAPES = 64  # of the inputs of one compiled function, at most; usually 8


def obstacle_to_graphs(train: TrainConfig, world: World) -> str:
    """Why no CUDA graphs are made of what is compiled, and of the optimizer's step; "" if they
    are. They save the launches of kernels.
    """
    obstacles = {
        "train.cuda_graphs=false": train.cuda_graphs == "false",
        "they are for GPUs": world.device.type != "cuda",
        "FSDP moves the weights": world.is_sharded,
        "each backward pass would overwrite the gradients of the one before": (
            train.gradient_accumulation_steps > 1
        ),
        "blocks that are computed again cannot be recorded": train.recompute == "block",
    }
    return next((text for text, holds in obstacles.items() if holds), "")


def compile_objective(
    objective: Objective, train: TrainConfig, shape: tuple[int, int], world: World
) -> bool:
    """Compiles the objective's parts in place, with a first pass on `shape`, (batch, tokens).
    Returns whether they are compiled.

    With CUDA graphs each part's forward and backward pass is replayed; a backward pass then writes
    its gradients over those of the one before.

    Call this before DDP or FSDP wrap the objective. One block is compiled for all of them, and DDP
    gets a block's gradients as soon as the backward pass of that block ends. Compiled functions
    replace methods, so that parameters keep their names. Another shape of the inputs would compile
    once more. Where compiling fails on a process, all go on without it.
    """
    if train.compile == "no" or (train.compile == "auto" and world.device.type != "cuda"):
        return False
    from torch._dynamo.utils import counters  # takes a second to import

    obstacle = obstacle_to_graphs(train, world)
    graphs, parts = not obstacle, compiled_parts(objective)
    torch._dynamo.reset()  # what an earlier run of this process has compiled; graphs hold memory
    each_pass = objective.register_forward_pre_hook(begin_graphs) if graphs else None
    began, failure = time.perf_counter(), ""
    for module, name in parts:
        setattr(module, name, compiled(getattr(module, name), graphs))
    try:
        for _ in range(2 if graphs else 1):  # the second pass records the graphs
            _first_pass(objective, shape, world)
    except Exception as error:  # if it is not the compiler's, the run will meet it again
        failure = first_line(error)
    if failure := next(filter(None, world.gather(failure)), ""):
        for module, name in parts:
            delattr(module, name)
        if each_pass:
            each_pass.remove()
        objective.zero_grad(set_to_none=True)  # the first step would add up what a pass left
        world.say(
            f"torch.compile has failed, the run goes on without: {failure}. It needs a C++ "
            "compiler on a CPU, Triton and a C compiler on a GPU of compute capability 7.0 or "
            f"more. {'train.cuda_graphs=false may help, ' * graphs}train.compile=no saves the "
            "attempt"
        )
        return False
    seconds = time.perf_counter() - began
    with_graphs = "as CUDA graphs" if graphs else f"without CUDA graphs: {obstacle}"
    if graphs and (skipped := counters["inductor"]["cudagraph_skips"]):
        with_graphs = f"{skipped} of its parts not as CUDA graphs"
    world.say(f"train.compile: compiled in {seconds:.0f} s, {with_graphs}")
    return True


def compiled_parts(objective: Objective) -> list[tuple[nn.Module, str]]:
    """The methods to compile, as (module, name of the method): each block's, the output layer's and
    the loss.

    The output layer has nothing to fuse. But between two CUDA graphs its output, the logits, would
    be copied to the place where the loss expects them.
    """
    is_block = GradientCheckpointingLayer
    blocks = [(part, "forward") for part in objective.modules() if isinstance(part, is_block)]
    return [*blocks, (objective.get_output_embeddings(), "forward"), (objective, "score")]


def compiled(function: Callable, graphs: bool) -> Callable:
    """torch.compile for inputs of few shapes, without graph breaks.

    By default the compiler measures several kernels and takes the fastest. Each sums in its own
    order, so a resumed run, which compiles again, could differ in its last bits. Here the compiler
    chooses by rule.
    """
    from torch._inductor import config

    options = {"triton.cudagraphs": graphs}
    if hasattr(config, "deterministic"):
        options["deterministic"] = True
    else:  # older versions: for block sizes, smaller blocks beside them, and padded products
        older = ("triton.autotune_pointwise", "dynamic_scale_rblock", "shape_padding")
        options |= dict.fromkeys(older, False)
    # The optimizers' functions have a form for each shape of their parameters' parts.
    limits = torch._dynamo.config
    limits.cache_size_limit = max(SHAPES, limits.cache_size_limit)
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def begin_graphs(*_) -> None:
    """Runs before each forward pass: CUDA graphs may overwrite what they wrote in the last step,
    the gradients included.
    """
    torch.compiler.cudagraph_mark_step_begin()


def _first_pass(objective: nn.Module, shape: tuple[int, int], world: World) -> None:
    """A forward and backward pass on `shape`, (batch, tokens), whose gradients are dropped."""
    tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
    with world.accelerator.autocast():
        nats = objective(tokens, tokens.clone())
    nats.sum().backward()
    objective.zero_grad(set_to_none=True)


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
