"""What computes the token mixing of a run on a GPU whose model.mixing_backend is auto.

Our kernels do, where they can. On GPUs on which nobody has timed them a race before the first step
decides. Checkpoints keep the choice, because the other backend would round differently.
"""

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mixer.common.errors import first_line
from mixer.distributed.world import World
from mixer.models.masked_mixer.mixing import KeyedConv, TriangularConv
from mixer.ops import choice
from mixer.training.compile import compiled
from mixer.training.config import RunConfig

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TIMED = (9, 0)  # on Hopper the kernels won wherever they were timed
ROUNDS, ROUND_MS = 7, 5.0  # of the race


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
    parts = [part for part in model.modules() if isinstance(part, TriangularConv)]
    keyed = [part for part in parts if isinstance(part, KeyedConv)]
    others = [part for part in parts if not isinstance(part, KeyedConv)]
    before, record = (earlier or {}).get("mixing") or {}, {}
    about = (run, is_compiled, world)
    if others:
        record = settle(others, before, *about)
    if keyed:
        record["keyed"] = settle(keyed, before.get("keyed") or {}, *about)
    return record or None


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def settle(
    parts: list[TriangularConv],
    before: dict[str, Any],
    run: RunConfig,
    is_compiled: bool,
    world: World,
) -> dict[str, Any]:
    """`settle_mixing` for parts of one kind, as `before` has it from an earlier checkpoint."""
    part, device = parts[0], world.device
    # This builds the kernels where they are not built yet, on all hosts at once.
    reasons = world.gather(missing_for(part, device, DTYPES[run.train.mixed_precision]))
    missing = next((reason for reason in reasons if reason), None)
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
            chosen, why = race(part, run, is_compiled, device)
        what = "keyed mixing" if isinstance(part, KeyedConv) else "token mixing"
        world.say(f"{what}: auto takes {chosen}, {why}")
    chosen = world.of_main(chosen)
    for part in parts:
        part.backend = chosen
    return {"backend": chosen}


def missing_for(part: TriangularConv, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our kernels cannot take a part on this process; None if they can."""
    width = part.channels // part.heads
    if isinstance(part, KeyedConv):
        sizes = (part.heads, part.key_size, width, part.context)
        return choice.keyed_unavailable_reason(device, dtype, *sizes)
    return choice.call_reason(device, dtype, width * dtype.itemsize % 16 == 0)


# ------------------------------------------------------------------------- the race


def race(
    part: TriangularConv, run: RunConfig, is_compiled: bool, device: torch.device
) -> tuple[str, str]:
    """The faster backend in a forward and backward of a part on the run's own shape, and why. A
    backend that fails, and kernels whose results are wrong, are out.
    """
    steps, wanted, failures = {}, None, ""
    for backend in ("dense", "cuda"):
        try:
            step = training_step(part, backend, run, is_compiled, device)
            results = step()
            problem = choice.difference(results.values(), wanted, results) if wanted else None
        except Exception as error:  # the compiler's and Triton's errors have no type of their own
            problem = first_line(error)
        if problem:
            failures += f"; without {backend}: {problem}"
        else:
            steps[backend], wanted = step, list(results.values())
        results = None
    times = interleaved(steps)
    del steps, step, wanted
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)  # the run reports its own
    listed = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
    why = f"the faster on {torch.cuda.get_device_name(device)}: {listed or 'neither ran'}{failures}"
    return min(times, key=times.get, default="dense"), why


def training_step(
    part: TriangularConv, backend: str, run: RunConfig, is_compiled: bool, device: torch.device
) -> Callable[[], dict[str, Tensor]]:
    """A forward and backward of a copy of the part by a backend, as the run has them, on random
    numbers that are the same in each call. It returns the results and gradients by name.
    """
    part, generator = copy.deepcopy(part).to(device), torch.Generator(device).manual_seed(0)
    part.backend = backend

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def inputs(width: int) -> Tensor:
        drawn = draw(run.train.batch_size, part.context, width)
        return drawn.to(DTYPES[run.train.mixed_precision]).requires_grad_()

    names, memory = ("x", "residual"), ()
    given = [inputs(part.channels), inputs(part.channels)]
    if isinstance(part, KeyedConv):
        keys = part.heads * part.key_size
        names, memory = ("query", "key", "value"), (None, None)
        given = [inputs(keys), inputs(keys), inputs(part.channels)]
    leaves = dict(zip(names, given, strict=True)) | dict(part.named_parameters())
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.copy_(draw(*parameter.shape) / part.context**0.5)
    dy = inputs(part.channels).detach()
    conv = compiled(part.forward, graphs=False) if is_compiled else part

    def step() -> dict[str, Tensor]:
        y = conv(*given, *memory)
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        return {"y": y.detach()} | {
            f"d{name}": x for name, x in zip(leaves, gradients, strict=True)
        }

    return step


def interleaved(steps: dict[str, Callable]) -> dict[str, float]:
    """Median milliseconds of each step, measured in turns, so that clocks and heat favour none."""
    counts = {
        name: max(1, int(ROUND_MS / min(milliseconds(step, 1) for _ in range(3))))
        for name, step in steps.items()
    }
    rounds = [
        {name: milliseconds(step, counts[name]) for name, step in steps.items()}
        for _ in range(ROUNDS)
    ]
    return {name: statistics.median(times[name] for times in rounds) for name in steps}


def milliseconds(step: Callable, count: int) -> float:
    """GPU time of one of `count` calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count
