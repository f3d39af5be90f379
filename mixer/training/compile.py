"""How a model computes a step: what is compiled, and replayed as CUDA graphs, and what the backward
pass computes again.
"""

import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mixer.common.errors import UserError, first_line
from mixer.distributed.world import World
from mixer.training.config import TrainConfig
from mixer.training.objective import Objective

SHAPES = 64  # of the inputs of one compiled function, at most; usually 8


def parts_compiled(train: TrainConfig, device: torch.device) -> str:
    """train.compile: "no", "blocks" or "model". auto is blocks on a GPU."""
    if train.compile != "auto":
        return train.compile
    return "blocks" if device.type == "cuda" else "no"


def obstacle_to_graphs(train: TrainConfig, device: torch.device, is_sharded: bool) -> str:
    """Why no CUDA graphs are made of what is compiled; "" if they are. They save the launches of
    kernels.

    is_sharded: by FSDP. Raises UserError where train.cuda_graphs=true asks for what cannot be.
    """
    obstacles = {
        "they are for GPUs": device.type != "cuda",
        "FSDP moves the weights": is_sharded,
        "they are made of what is compiled": parts_compiled(train, device) == "no",
        "each backward pass would overwrite the gradients of the one before": (
            train.gradient_accumulation_steps > 1
        ),
        "blocks that are computed again cannot be recorded": train.recompute == "block",
    }
    obstacle = next((text for text, holds in obstacles.items() if holds), "")
    if train.cuda_graphs == "true" and obstacle:
        raise UserError(
            f"train.cuda_graphs = true cannot be had with these settings and devices: {obstacle}; "
            "allowed here: auto, false"
        )
    return "train.cuda_graphs=false" if train.cuda_graphs == "false" else obstacle


def compile_objective(
    objective: Objective, train: TrainConfig, shape: tuple[int, int], world: World
) -> bool:
    """Compiles the objective in place as the settings say, with a first pass on `shape`, (batch,
    tokens).

    "blocks" compiles each block, the output layer and the loss. With CUDA graphs each compiled
    part's forward and backward pass is replayed; a backward pass then writes its gradients over
    those of the one before.

    Call this before DDP or FSDP wrap the objective. With "blocks", one block is compiled for all of
    them, and DDP gets a block's gradients as soon as the backward pass of that block ends. Compiled
    functions replace methods, so that parameters keep their names. Another shape of the inputs
    would compile once more. If compiling fails on any process, all continue without it. Returns
    whether the objective is compiled.
    """
    how = parts_compiled(train, world.device)
    parts = compiled_parts(objective, how)
    if not parts:
        return False
    obstacle = obstacle_to_graphs(train, world.device, world.is_sharded)
    graphs = not obstacle
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
    failure = next(filter(None, world.gather(failure)), "")
    if not failure:
        with_graphs = _graphs_said() if graphs else f"without CUDA graphs: {obstacle}"
        seconds = time.perf_counter() - began
        world.say(f"train.compile={how}: compiled in {seconds:.0f} s, {with_graphs}")
        return True
    for module, name in parts:
        delattr(module, name)
    if each_pass:
        each_pass.remove()
    remedy = "train.cuda_graphs=false may help, " if graphs else ""
    world.say(
        f"train.compile={how} failed, the run goes on without: {failure}. Nothing else changes; "
        f"{remedy}train.compile=no saves the attempt. torch.compile needs a C++ compiler on a CPU, "
        "Triton and a C compiler on a GPU of compute capability 7.0 or more"
    )
    return False


def compiled_parts(objective: Objective, how: str) -> list[tuple[nn.Module, str]]:
    """The methods to compile, as (module, name of the method).

    The output layer has nothing to fuse. But between two CUDA graphs its output, the logits, would
    be copied to the place where the loss expects them.
    """
    is_block = GradientCheckpointingLayer
    blocks = [(part, "forward") for part in objective.modules() if isinstance(part, is_block)]
    head = (objective.get_output_embeddings(), "forward")
    parts = {
        "no": [],
        "blocks": [*blocks, head, (objective, "score")],
        "model": [(objective, "forward")],
    }
    return parts[how]


def compiled(function: Callable, graphs: bool) -> Callable:
    """torch.compile for inputs of few shapes, without graph breaks.

    By default the compiler measures several kernels and takes the fastest. Each sums in its own
    order, so a resumed run, which compiles again, could differ in its last bits. Here the compiler
    chooses by rule.
    """
    options = by_rule() | {"triton.cudagraphs": graphs}
    # The optimizers' functions have a form for each shape of their parameters' parts.
    limits = torch._dynamo.config
    limits.cache_size_limit = max(SHAPES, limits.cache_size_limit)
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def by_rule() -> dict[str, bool]:
    """The compiler's options that keep it from measuring: one of newer versions; of older ones,
    those for block sizes, for smaller blocks beside them, and for padded products.
    """
    from torch._inductor import config

    if hasattr(config, "deterministic"):
        return {"deterministic": True}
    older = ("triton.autotune_pointwise", "dynamic_scale_rblock", "shape_padding")
    return dict.fromkeys(older, False)


def begin_graphs(*_) -> None:
    """Runs before each forward pass: CUDA graphs may overwrite what they wrote in the last step,
    the gradients included.
    """
    torch.compiler.cudagraph_mark_step_begin()


def _first_pass(objective: nn.Module, shape: tuple[int, int], world: World) -> None:
    """A forward and backward pass on `shape`, (batch, tokens), whose gradients are dropped."""
    tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
    try:
        with world.accelerator.autocast():
            nats = objective(tokens, tokens.clone())
        nats.sum().backward()
    finally:  # a backward pass that fails leaves gradients, which the first step would add up
        objective.zero_grad(set_to_none=True)


def _graphs_said() -> str:
    from torch._dynamo.utils import counters  # takes a second to import

    skipped = counters["inductor"]["cudagraph_skips"]
    not_all = f"{skipped} of its parts not as CUDA graphs (TORCH_LOGS=perf_hints says why)"
    return not_all if skipped else "as CUDA graphs"


# ------------------------------------------------------------------------- recomputation


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
