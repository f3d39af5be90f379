"""The model with its loss as one forward pass: what DDP and FSDP wrap, what torch.compile compiles,
what is evaluated.
"""

import time
from collections.abc import Callable

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mixer.common.errors import UserError, first_line
from mixer.distributed.hosts import Hosts
from mixer.training.validation import token_nats


class Objective(nn.Module):
    """Inputs and targets, (batch, tokens) int64, -> nats of each target, (batch, tokens) fp32, 0
    where the target is -100.

    Logits stay inside: compiled, they are kept in the autocast type and the loss is taken in fp32
    where it is summed.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self._no_split_modules = (
            model._no_split_modules
        )  # accelerate asks: the class of the blocks, which FSDP shards one by one

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.score(self.model(inputs, use_cache=False).logits, targets)

    def score(self, logits: Tensor, targets: Tensor) -> Tensor:
        return token_nats(logits, targets).view_as(targets)

    def get_input_embeddings(
        self,
    ) -> nn.Module:  # accelerate asks for these two: FSDP shards them apart from the blocks
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()


def set_recompute(model: PreTrainedModel, what: str) -> None:
    """What the backward pass computes again instead of keeping it (selective activation
    recomputation, arXiv 2205.05198).

    With A = batch x tokens x hidden_size numbers of the autocast type, a compiled block keeps for
    its backward pass

        A    its input, for both residual and norm               A    what the first norm gives, an operand of the mixing's
                                                                      weight gradient
        A    the stream after mixing, the second norm's input    A    what the second norm gives, an operand of up_proj's
        4 A  what up_proj gives, the GELU's input                4 A  what the GELU gives, an operand of down_proj's

    and small things: the norms' statistics, the packed and cast weights. `none` keeps all 12 A;
    `activation` computes the GELU again (8 A); `block` keeps a block's input alone (A) and computes
    the block again. Without the compiler autocast adds what the norms read, in fp32.
    """
    if what == "activation":
        for module in model.modules():
            if hasattr(module, "recompute_activation"):
                module.recompute_activation = True
    if what == "block":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers' hook for adapters on a frozen model, which torch 2.11 cannot compile where
        # there are no gradients
        model.disable_input_require_grads()


def compile_objective(
    objective: Objective,
    how: str,
    graphs: bool,
    shape: tuple[int, int],
    accelerator: Accelerator,
    hosts: Hosts,
    say,
) -> bool:
    """torch.compile of every block and of the loss (`blocks`) or of everything at once (`model`),
    by a first pass of `shape`.

    With `graphs` a GPU replays what is compiled as CUDA graphs, each part's forward and backward
    pass as one: gradients then lie where the next backward pass writes its own. Raises UserError
    where that cannot be.

    To be called before DDP or FSDP wrap the objective. `blocks` compiles one block for all of them,
    and each hands its gradients to DDP when its own backward pass ends. Compiled forwards are
    attributes of the modules: the names of parameters stay. Shapes are fixed: another shape is
    another compilation. Where compiling fails on any process, all go on without; returns whether it succeeded.
    """
    parts = compiled_parts(objective, how)
    if not parts:
        return False
    if graphs:
        require_graphs(accelerator)
        objective.register_forward_pre_hook(begin_graphs)
    began = time.perf_counter()
    for module, name in parts:
        setattr(module, name, compiled(getattr(module, name), graphs))
    failure = ""
    try:
        for _ in range(2 if graphs else 1):  # they are captured in the second pass
            first_pass(objective, shape, accelerator)
    except (
        Exception
    ) as error:  # whatever it is: if it was not the compiler's, the run without it meets it again
        failure = first_line(error)
    failures = [text for text in hosts.gather(failure) if text]
    if not failures:
        replayed = f", {graphs_said()}" if graphs else ""
        say(f"train.compile={how}: compiled in {time.perf_counter() - began:.0f} s{replayed}")
        return True
    for module, name in parts:
        delattr(module, name)
    say(
        f"train.compile={how} failed, the run goes on without: {failures[0]}. Nothing else changes; train.compile=no spares the "
        "attempt, and torch.compile needs a C++ compiler on a CPU, Triton and a C compiler on a GPU"
    )
    return False


def first_pass(objective: nn.Module, shape: tuple[int, int], accelerator: Accelerator) -> None:
    """A forward and backward pass whose gradients are thrown away, as `shape` (batch, tokens) will
    run.
    """
    inputs, targets = (
        torch.zeros(shape, dtype=torch.int64, device=accelerator.device) for _ in range(2)
    )
    try:
        with accelerator.autocast():
            nats = objective(inputs, targets)
        nats.sum().backward()
    finally:  # a backward pass that fails half way leaves some, which the first step would add to its own
        objective.zero_grad(set_to_none=True)


def require_graphs(accelerator: Accelerator) -> None:
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded or accelerator.device.type != "cuda":
        where = (
            "with FSDP, whose weights move"
            if sharded
            else f"on a {accelerator.device.type.upper()}"
        )
        raise UserError(
            f"train.cuda_graphs = true {where}; allowed on CUDA GPUs with or without DDP; set train.cuda_graphs=false"
        )


def begin_graphs(*_) -> None:
    """Before each forward pass: what the last one's replays wrote, its gradients among it, may be
    overwritten.
    """
    torch.compiler.cudagraph_mark_step_begin()


def graphs_said() -> str:
    from torch._dynamo.utils import counters  # takes a second to import

    skipped = counters["inductor"]["cudagraph_skips"]
    return (
        f"{skipped} of its parts not as CUDA graphs (TORCH_LOGS=perf_hints says why)"
        if skipped
        else "as CUDA graphs"
    )


def compiled(function: Callable, graphs: bool) -> Callable:
    """torch.compile for shapes that stay, without graph breaks.

    Left alone, the compiler takes of several kernels the one that was fastest just then; each sums
    in its own order, and a resumed run that compiles anew would differ in its last bits. An older
    torch cannot be told to choose by rule: there a resume is exact as long as the compiler's cache
    is kept.
    """
    from torch._inductor import config

    by_rule = {"deterministic": True} if hasattr(config, "deterministic") else {}
    return torch.compile(
        function, fullgraph=True, dynamic=False, options=by_rule | {"triton.cudagraphs": graphs}
    )


def compiled_parts(objective: Objective, how: str) -> list[tuple[nn.Module, str]]:
    """The methods that are compiled, each with its module."""
    blocks = [
        (module, "forward")
        for module in objective.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    return {"no": [], "blocks": [*blocks, (objective, "score")], "model": [(objective, "forward")]}[
        how
    ]
