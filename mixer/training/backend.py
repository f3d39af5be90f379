"""Which backends compute a run's token mixing where model.mixing_backend is auto.

On Hopper our kernels won wherever they were timed, so `auto` takes them wherever they can run. On
other GPUs nobody has timed them: there a race before the first step decides. Checkpoints keep its
result, since the other backend would round differently.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mixer.common.errors import UserError, first_line
from mixer.common.hardware import PRECISIONS
from mixer.distributed.world import World
from mixer.models.masked_mixer.convolution import KeyedConv, RecurrentConv, TriangularConv
from mixer.ops.triangular import difference
from mixer.training.config import RunConfig

RACE_SECONDS = 0.2  # for each backend


def check_backend(run: RunConfig, device: torch.device) -> None:
    """Raises UserError for kernels where there is no GPU."""
    if run.model.mixing_backend == "cuda" and device.type != "cuda":
        raise UserError(
            f"model.mixing_backend is cuda, but training is on the {device.type}; allowed there: "
            "auto, dense"
        )


def settle_backend(
    model: PreTrainedModel, run: RunConfig, earlier: dict[str, Any] | None, world: World
) -> dict[str, str]:
    """Sets the backend of the model's convolutions and keyed mixing by a race, the same on all
    processes, before the model is compiled. A recurrence has none.

    earlier: trainer.json of the checkpoint that the run goes on from. Returns what the next ones
    keep: the backend of each kind of layer that had a race.
    """
    recorded = (earlier or {}).get("mixing") or {}
    convolutions = [layer for layer in model.modules() if isinstance(layer, TriangularConv)]
    racing = [layer for layer in convolutions if not isinstance(layer, RecurrentConv)]
    backends = {}
    for entry, title in (("backend", "token mixing"), ("keyed_backend", "keyed mixing")):
        is_keyed = entry == "keyed_backend"
        layers = [layer for layer in racing if isinstance(layer, KeyedConv) == is_keyed]
        if not layers:
            continue
        backend = recorded.get(entry)
        reason = "as the run did before"
        # A checkpoint may have a backend that is gone, such as the kernels for fp32.
        is_gone = backend == "cuda" and not is_keyed and run.train.mixed_precision == "no"
        if backend not in ("dense", "cuda") or is_gone:
            backend, reason = race(layers[0], run, world) if world.is_main else ("", "")
        world.say(f"{title}: auto uses {backend}, {reason}")
        backends[entry] = world.of_main(backend)
        for layer in layers:
            layer.backend = backends[entry]
    return backends


def race(layer: TriangularConv, run: RunConfig, world: World) -> tuple[str, str]:
    """The faster backend for a layer on the run's own shape, and why. Kernels that cannot run, fail
    or are wrong are out.
    """
    times = {}
    results = []
    inputs = ("query", "key", "value") if isinstance(layer, KeyedConv) else ("x", "residual")
    names = ["y", *(f"d{name}" for name in (*inputs, *dict(layer.named_parameters())))]
    for backend in ("dense", "cuda"):
        try:
            step = training_step(layer, backend, run, world)
            results.append(step())
            problem = difference(results[-1], results[0], names)
            times[backend] = milliseconds(step)
        except Exception as error:  # what the build and CUDA raise has no type of its own
            problem = first_line(error)
    step = results = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(world.device)  # the run reports its own
    if problem:
        return "dense", f"without cuda: {problem}"
    listed = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
    gpu = torch.cuda.get_device_name(world.device)
    return min(times, key=times.get), f"the faster on {gpu}: {listed}"


def milliseconds(step: Callable) -> float:
    # Its import looks for GPUs, and a process that has done so cannot be forked into one that uses
    # them.
    from torch.utils.benchmark import Timer

    timer = Timer("step()", globals={"step": step})
    return 1000 * timer.blocked_autorange(min_run_time=RACE_SECONDS).median


def training_step(
    layer: TriangularConv, backend: str, run: RunConfig, world: World
) -> Callable[[], list[Tensor]]:
    """A forward and backward pass of a copy of the layer by a backend, on random numbers that are
    the same in each call. It returns the output and the gradients of inputs and parameters.
    """
    layer = copy.deepcopy(layer).to(world.device)
    layer.backend = backend
    generator = torch.Generator(world.device).manual_seed(0)
    dtype = PRECISIONS[run.train.mixed_precision]

    def draw(channels: int) -> Tensor:
        shape = (run.train.batch_size, run.model.max_position_embeddings, channels)
        return torch.randn(shape, device=world.device, dtype=dtype, generator=generator)

    keys = [layer.heads * layer.key_size] * 2 if isinstance(layer, KeyedConv) else []
    inputs = [draw(channels).requires_grad_() for channels in (keys or [layer.channels])]
    inputs.append(draw(layer.channels).requires_grad_())
    dy = draw(layer.channels)
    leaves = [*inputs, *layer.parameters()]

    def step() -> list[Tensor]:
        with world.accelerator.autocast():
            y = layer(*inputs)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return step
