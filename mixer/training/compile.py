"""torch.compile for training: what is compiled, how, and replaying it as CUDA graphs."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from mixer.common.errors import first_line
from mixer.distributed.world import World
from mixer.training.gradients import gradient_norm
from mixer.training.objective import Objective
from mixer.training.optim import OptimConfig, build_optimizer

SHAPES = 64  # of the inputs of one compiled function, at most; usually 8


def compile_objective(
    objective: Objective, how: str, graphs: bool, shape: tuple[int, int], world: World
) -> bool:
    """Compiles the objective in place, with a first pass on `shape`, (batch, tokens).

    how: "no" (nothing is done), "blocks" (each block, the output layer and the loss) or "model"
    (all at once).
    graphs: replay each compiled part's forward and backward pass as a CUDA graph. A backward pass
    then writes its gradients over those of the one before. mixer.training.parallelize says where
    graphs can be used.

    Call this before DDP or FSDP wrap the objective. With "blocks", one block is compiled for all of
    them, and DDP gets a block's gradients as soon as the backward pass of that block ends. Compiled
    functions replace methods, so that parameters keep their names. Another shape of the inputs
    would compile once more. If compiling fails on any process, all continue without it. Returns
    whether the objective is compiled.
    """
    parts = compiled_parts(objective, how)
    if not parts:
        return False
    # What an earlier run of this process, or an attempt, has compiled; the graphs hold memory.
    torch._dynamo.reset()
    each_pass = objective.register_forward_pre_hook(begin_graphs) if graphs else None
    began = time.perf_counter()
    for module, name in parts:
        setattr(module, name, compiled(getattr(module, name), graphs))

    def try_it() -> None:
        for _ in range(2 if graphs else 1):  # the second pass records the graphs
            _first_pass(objective, shape, world)

    failure = _failure(try_it, world)
    if not failure:
        replayed = f", {_graphs_said()}" if graphs else ""
        world.say(f"train.compile={how}: compiled in {time.perf_counter() - began:.0f} s{replayed}")
        return True
    for module, name in parts:
        delattr(module, name)
    if each_pass:
        each_pass.remove()
    recorded = " with CUDA graphs" if graphs else ""
    world.say(
        f"train.compile={how}{recorded} failed, the run goes on without: {failure}. Nothing else "
        "changes; train.compile=no saves the attempt. torch.compile needs a C++ compiler on a "
        "CPU, Triton and a C compiler on a GPU"
    )
    return False


def optimizer_compiler(
    model: nn.Module, config: OptimConfig, world: World
) -> Callable[[Callable], Callable] | None:
    """What makes the optimizer's functions of whole parameters faster; None where compiling them
    fails on any process, which a line says.

    It tries them in a step that changes nothing. A failure in a real step would come too late: the
    other processes may have taken it. They are not recorded in CUDA graphs.
    """
    compile = partial(compiled, graphs=False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(model, config, compile=compile)  # of this process alone
    optimizer.found_inf = torch.ones((), device=parameters[0].device)

    def try_it() -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        gradient_norm(optimizer)
        optimizer.step()

    failure = _failure(try_it, world)
    optimizer.zero_grad(set_to_none=True)
    if failure:
        world.say(f"compiling the optimizer failed, the run goes on without: {failure}")
    return None if failure else compile


def _failure(attempt: Callable[[], None], world: World) -> str:
    """Makes an attempt on all processes; returns what failed on one of them, empty if nothing."""
    failure = ""
    try:
        attempt()
    except Exception as error:  # if it is not the compiler's, the run will meet it again
        failure = first_line(error)
    return next((text for text in world.gather(failure) if text), "")


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
