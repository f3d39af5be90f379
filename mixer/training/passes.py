"""What a step computes: which parts of the model and its loss are compiled, and their forward and
backward passes, which a GPU may replay as a CUDA graph.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import mixer.ops
from mixer.common.errors import UserError, first_line
from mixer.common.hardware import is_out_of_memory
from mixer.distributed.world import World
from mixer.models.architecture import blocks_of, final_norm
from mixer.models.masked_mixer.modeling import MLP
from mixer.objectives.config import traits_of
from mixer.objectives.objective import Loss
from mixer.training.config import RunConfig

HOPPER = (9, 0)  # compute capability
SHAPES = 64  # of the inputs of one compiled function, at most; usually 8


def obstacle_to_graph(run: RunConfig, world: World) -> str:
    """Why no CUDA graph is made of a step's passes; "" if one is."""
    train = run.train
    if train.cuda_graphs == "false":
        return "train.cuda_graphs=false"
    if world.device.type != "cuda":
        return "there is no GPU"
    if world.is_sharded:
        return "FSDP moves the weights"
    if train.gradient_accumulation_steps > 1:
        return "micro-batches are accumulated"
    if train.recompute == "block":
        return "recomputed blocks cannot be recorded"
    if traits_of(train, run.data).compares_samples and world.size > 1:
        return "the loss compares samples of several processes"
    if train.cuda_graphs == "auto" and torch.cuda.get_device_capability(world.device) < HOPPER:
        # and DDP sums gradients beside the backward pass, over slower links too
        return "this GPU computes for longer than the CPU needs to launch it"
    if train.cuda_graphs == "auto" and run.model.architecture == "auto":
        return "the model may need the CPU in the middle; train.cuda_graphs=true tries it"
    return ""


def compile_loss(loss: Loss, run: RunConfig, shape: tuple[int, int], world: World) -> bool:
    """Compiles the parts of the model and its loss in place, with a first pass on `shape`, (batch,
    tokens). Returns whether they are compiled.

    Call this before DDP or FSDP wrap the loss; with FSDP the first pass comes after that. One
    block is compiled for all of them, and DDP gets a block's gradients as soon as the backward pass
    of that block ends. Compiled functions replace methods, so that parameters keep their names.
    Where compiling fails on a process, all go on without it.
    """
    choice = run.train.compile
    if choice == "no" or (choice == "auto" and world.device.type != "cuda"):
        return False
    torch._dynamo.reset()  # what an earlier run of this process has compiled
    began = time.perf_counter()
    failure = ""
    methods = compiled_parts(loss)
    for module, name in methods:
        setattr(module, name, compiled(getattr(module, name)))
    try:
        tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
        if world.is_sharded:  # no device need hold the whole model: this tries the compiler alone
            compiled(F.gelu)(tokens.float())
        else:
            with world.accelerator.autocast():
                nats = loss(tokens, tokens.clone())
            nats.sum().backward()
    except Exception as error:  # if it is not the compiler's, the run will meet it again
        failure = first_line(error)
    loss.zero_grad(set_to_none=True)  # the first step would add up what a pass left
    failures = [message for message in world.gather(failure) if message]
    if failures:
        for module, name in methods:
            delattr(module, name)
        world.say(
            f"torch.compile has failed, the run continues without it: {failures[0]}. It needs a "
            "C++ compiler on a CPU, Triton and a C compiler on a GPU of compute capability 7.0 or "
            "newer. train.compile=no skips the attempt"
        )
        return False
    seconds = time.perf_counter() - began
    obstacle = obstacle_to_graph(run, world)
    with_graph = f"without a CUDA graph: {obstacle}" if obstacle else "replayed as a CUDA graph"
    world.say(f"train.compile: compiled in {seconds:.0f} s, {with_graph}")
    return True


def compiled_parts(loss: Loss) -> list[tuple[nn.Module, str]]:
    """The methods to compile, as (module, name of the method): each block's, the final norm's, and
    the loss's own.
    """
    modules = blocks_of(loss.model)
    if norm := final_norm(loss.model):
        modules = [*modules, norm]
    own_methods = [(loss, name) for name in loss.compiled_methods]
    return [(module, "forward") for module in modules] + own_methods


def compiled(function: Callable) -> Callable:
    """torch.compile for inputs of few shapes, without graph breaks.

    By default the compiler measures several kernels and takes the fastest. Each sums in its own
    order, so a resumed run, which compiles again, could differ in its last bits. Here the compiler
    chooses by rule.
    """
    from torch._inductor import config

    options: dict[str, Any]
    if hasattr(config, "deterministic"):
        options = {"deterministic": True}
    else:  # older versions: for block sizes, smaller blocks beside them, and padded products
        older = ("triton.autotune_pointwise", "dynamic_scale_rblock", "shape_padding")
        options = dict.fromkeys(older, False)
    # The compiler keeps code on disk by what calls an operator, but in it are the calls of the
    # operator's gradients: another version of them must not find it.
    if hasattr(torch.compiler.config, "cache_key_tag"):  # from torch 2.7 on
        torch.compiler.config.cache_key_tag = operators_hash()
    # The optimizers' functions have a form for each shape of their parameters' parts.
    limits = torch._dynamo.config
    limits.cache_size_limit = max(SHAPES, limits.cache_size_limit)
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


@functools.cache
def operators_hash() -> str:
    files = sorted(Path(mixer.ops.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class Passes:
    """The forward and backward passes of a step, which leave the gradients of all processes.

    On a GPU that is fast for its CPU they are one CUDA graph, replayed by one launch in place of
    thousands. A graph reads and writes the same memory at each replay: the batch is copied there,
    and the gradients stay where they are. Its processes sum their gradients at once, after it, in
    bf16 where that is the autocast type; DDP, which the other GPUs have, sums them beside the
    backward pass.

    Args:
        parallel: the model with its loss, in DDP or FSDP where there is no graph.
    """

    def __init__(self, parallel: nn.Module, world: World):
        self.parallel = parallel
        self.world = world
        self.accelerator = world.accelerator
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batches: Sequence[tuple[Tensor, Tensor]], factor: float | Tensor) -> Tensor:
        """Leaves the gradients of `factor` times the sum of the batches' losses, as means over the
        processes, where there are none yet. Returns the sum of this process's losses, fp32.

        batches: micro-batches of two tensors, (batch, tokens) int64 each.
        """
        if self.graph is None:
            return self._forward_backward(batches, factor)
        (batch,) = batches
        for buffer, tensor in zip(self.batch, batch, strict=True):
            buffer.copy_(tensor)
        self.factor.copy_(factor) if isinstance(factor, Tensor) else self.factor.fill_(factor)
        self.graph.replay()
        if self.world.size > 1:
            torch._foreach_copy_(self.sums, self.gradients)  # pyright: ignore[reportPrivateImportUsage]
            dist.all_reduce(self.exchanged, dist.ReduceOp.AVG)  # DDP takes the mean, too
            torch._foreach_copy_(self.gradients, self.sums)  # pyright: ignore[reportPrivateImportUsage]
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            weight.grad = gradient
        return self.nats

    def record(self, shape: tuple[int, int]) -> None:
        """Makes the graph, for batches of `shape`, (batch, tokens). Raises UserError."""
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.world.device)
        self.batch = (tokens, tokens.clone())
        self.factor = torch.zeros((), device=tokens.device)
        # This makes what stays: workspaces, the scale of fp16.
        self._forward_backward([self.batch], self.factor)
        self.parallel.zero_grad(set_to_none=True)
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.nats = self._forward_backward([self.batch], self.factor)
        except Exception as error:  # after which this process may be unable to use its GPU
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"the passes of a step cannot be recorded as a CUDA graph: {first_line(error)}; "
                "train.cuda_graphs=false trains without one"
            ) from error
        self.graph = graph
        self.weights = [w for w in self.parallel.parameters() if w.grad is not None]
        self.gradients = [w.grad for w in self.weights if w.grad is not None]
        if self.world.size > 1:
            in_bf16 = self.accelerator.mixed_precision == "bf16"
            dtype = torch.bfloat16 if in_bf16 else torch.float32
            counts = [gradient.numel() for gradient in self.gradients]
            self.exchanged = torch.empty(sum(counts), dtype=dtype, device=tokens.device)
            chunks = zip(self.exchanged.split(counts), self.gradients, strict=True)
            self.sums = [chunk.view_as(gradient) for chunk, gradient in chunks]

    def _forward_backward(
        self, batches: Sequence[tuple[Tensor, Tensor]], factor: float | Tensor
    ) -> Tensor:
        nats = torch.zeros((), device=self.world.device)
        for micro, batch in enumerate(batches, 1):
            is_last = micro == len(batches)
            with nullcontext() if is_last else self.accelerator.no_sync(self.parallel):
                batch_nats = self.parallel(*batch).sum()
                self.accelerator.backward(batch_nats * factor)
                nats += batch_nats.detach()
        return nats


def set_recompute(model: PreTrainedModel, choice: str) -> None:
    """Sets what the backward pass computes again instead of keeping it in memory (selective
    activation recomputation, arXiv 2205.05198).

    With A = batch x tokens x hidden_size numbers of the autocast type, a compiled block keeps 12 A:
    A each for its input, the outputs of both norms and the residual stream after mixing, and 4 A
    each for the GELU's input and output. "none" keeps all of these. "activation" computes the GELU
    again and keeps 8 A. "block" keeps only the block's input, and computes the whole block again.
    Without the compiler, autocast also keeps the inputs of the norms in fp32.
    """
    if choice == "activation":
        for module in model.modules():
            if isinstance(module, MLP):
                module.recompute_activation = True
    if choice == "block":
        # Newer versions of transformers have another name for it, and warn at the old one.
        old_enable = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", old_enable)
        enable({"use_reentrant": False})
        # This undoes a hook that transformers adds for adapters on a frozen model. torch 2.11
        # cannot compile it where there are no gradients.
        model.disable_input_require_grads()
