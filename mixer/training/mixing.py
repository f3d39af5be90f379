"""What computes the token mixing of a run on a GPU whose model.mixing_backend is auto.

Our kernels do, where they can. On GPUs on which nobody has timed them a race before the first step
decides. Checkpoints keep the choice, because the other backend would round differently.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from transformers import PreTrainedModel

from mixer.common.errors import first_line
from mixer.distributed.world import World
from mixer.models.masked_mixer.convolution import KeyedConv, TriangularConv
from mixer.models.masked_mixer.mixing import TokenMixing
from mixer.ops import choice
from mixer.training.compile import compiled
from mixer.training.config import RunConfig

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TIMED = (9, 0)  # on Hopper the kernels won wherever they were timed
RACE_SECONDS = 0.2  # for each backend


def settle_mixing(
    model: PreTrainedModel,
    run: RunConfig,
    earlier: dict[str, Any] | None,
    is_compiled: bool,
    world: World,
) -> dict[str, Any] | None:
    """Sets the backend of every triangular convolution of the model, the same on all processes,
    where model.mixing_backend is auto and the device a GPU. Elsewhere nothing is done.

    It comes before the model is compiled. The main process chooses for all of them, and says so:
    what `earlier` says, the trainer.json of the checkpoint that the run goes on from, or else by
    rule or race. Keyed mixing has other kernels, and a choice of its own. Returns what trainer.json
    is to keep.
    """
    if run.model.mixing_backend != "auto" or not has_kernels(world.device):
        return None
    every = [layer for layer in model.modules() if isinstance(layer, TokenMixing)]
    layers = [layer for layer in every if convolutions(layer)]
    keyed = [layer for layer in layers if isinstance(convolutions(layer)[0], KeyedConv)]
    others = [layer for layer in layers if layer not in keyed]
    before, record = (earlier or {}).get("mixing") or {}, {}
    settled = partial(settle, run, is_compiled, world)
    if others:
        record["backend"] = settled("token mixing", others, before)
    if keyed:
        earlier_keyed = before.get("keyed") or {}
        record["keyed"] = {"backend": settled("keyed mixing", keyed, earlier_keyed)}
    return record or None


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def convolutions(layer: TokenMixing) -> list[TriangularConv]:
    return [part for part in layer.modules() if isinstance(part, TriangularConv)]


def settle(
    run: RunConfig,
    is_compiled: bool,
    world: World,
    kind: str,
    layers: list[TokenMixing],
    before: dict[str, Any],
) -> str:
    """Sets and returns the backend of layers of one kind, where `before` is its record in an
    earlier checkpoint.
    """
    device, dtype = world.device, DTYPES[run.train.mixed_precision]
    # This builds the kernels where they are not built yet, on all hosts at once.
    reasons = world.gather(missing_for(convolutions(layers[0])[0], device, dtype))
    missing = next(filter(None, reasons), None)
    chosen = None
    if world.is_main:
        kept = before.get("backend")
        if kept == "dense" or (kept == "cuda" and not missing):
            chosen, why = kept, "as the run did before"  # the same backend gives the same bits
        elif missing:
            chosen, why = "dense", f"since 'cuda' cannot run here: {missing}"
        elif torch.cuda.get_device_capability(device) == TIMED:
            chosen, why = "cuda", "the fastest wherever it was timed on such GPUs"
        else:
            chosen, why = race(layers[0], run, is_compiled, world)
        world.say(f"{kind}: auto takes {chosen}, {why}")
    chosen = world.of_main(chosen)
    for layer in layers:
        set_backend(layer, chosen)
    return chosen


def set_backend(layer: TokenMixing, backend: str) -> None:
    for part in convolutions(layer):
        part.backend = backend


def missing_for(part: TriangularConv, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our kernels cannot take a part on this process; None if they can."""
    width = part.channels // part.heads
    if isinstance(part, KeyedConv):
        sizes = (part.heads, part.key_size, width, part.context)
        return choice.keyed_unavailable_reason(device, dtype, *sizes)
    return choice.call_reason(device, dtype, width * dtype.itemsize % 16 == 0)


# ------------------------------------------------------------------------- the race


def race(layer: TokenMixing, run: RunConfig, is_compiled: bool, world: World) -> tuple[str, str]:
    """The faster backend in a forward and backward pass of a layer on the run's own shape, and why.
    A backend that fails, and kernels whose results are wrong, are out.
    """
    times, wanted, failures = {}, None, ""
    for backend in ("dense", "cuda"):
        try:
            step = training_step(layer, backend, run, is_compiled, world)
            results = step()
            problem = choice.difference(results.values(), wanted, results) if wanted else None
            if not problem:
                times[backend], wanted = milliseconds(step), list(results.values())
        except Exception as error:  # the compiler's and Triton's errors have no type of their own
            problem = first_line(error)
        if problem:
            failures += f"; without {backend}: {problem}"
    step = results = wanted = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(world.device)  # the run reports its own
    listed = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()) or "neither ran"
    gpu = torch.cuda.get_device_name(world.device)
    fastest = min(times, key=times.get, default="dense")
    return fastest, f"the faster on {gpu}: {listed}{failures}"


def milliseconds(step: Callable) -> float:
    timer = Timer("step()", globals={"step": step})
    return 1000 * timer.blocked_autorange(min_run_time=RACE_SECONDS).median


def training_step(
    layer: TokenMixing, backend: str, run: RunConfig, is_compiled: bool, world: World
) -> Callable[[], dict[str, Tensor]]:
    """A forward and backward pass of a copy of the layer by a backend, as the run has them, on
    random numbers that are the same in each call. It returns the output, and the gradients of the
    input and of what mixes tokens, by name.
    """
    device = world.device
    layer, generator = copy.deepcopy(layer).to(device), torch.Generator(device).manual_seed(0)
    set_backend(layer, backend)
    shape = (run.train.batch_size, run.model.max_position_embeddings, run.model.hidden_size)
    dtype = DTYPES[run.train.mixed_precision]
    x, dy = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2))
    leaves = {"x": x.requires_grad_()}
    for number, part in enumerate(convolutions(layer)):
        leaves |= {f"{name}{number or ''}": leaf for name, leaf in part.named_parameters()}
    mix = compiled(layer.forward, graphs=False) if is_compiled else layer
    residual = torch.zeros_like(x)

    def step() -> dict[str, Tensor]:
        with world.accelerator.autocast():
            y = mix(x, residual)
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        return {"y": y.detach()} | {
            f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)
        }

    return step
