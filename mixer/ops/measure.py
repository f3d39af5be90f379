"""Times the backends of the triangular convolution and of keyed mixing beside each other on a GPU.

`python -m mixer.ops.tune` measures a table of cases with it, and a training run its own case.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mixer.common.errors import first_line
from mixer.models.masked_mixer import plain
from mixer.ops import triangular_conv
from mixer.ops.timings import Case

ROUNDS = 7
LEAST_ROUNDS = 3
ROUND_MS = 5.0
ALL_MS = 700.0  # of all rounds: calls that take long have fewer of them
FAR_BEHIND = 3.0  # times as slow as the fastest: not measured more than once
MOST_APART = 2e-2  # relative: each backend rounds to the type, panels once more for each addition


RESULTS = ("y", "dx", "dweight", "dbias")
KEYED_RESULTS = ("y", "dquery", "dkey", "dvalue", "dweight", "dbias")


@dataclass
class Measured:
    """Milliseconds of a forward and backward by each backend that ran, and why others did not."""

    milliseconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def time_backends(
    case: Case,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    backends: Sequence[str],
    compile: Callable | None = None,
) -> Measured:
    """Times a forward and backward of a case by each backend, with bias and, of the triangular
    convolution, residual.

    Results are compared first, with those of the last of `backends` that runs: wrong results are a
    failure, as their time means nothing. So is any error: a lack of memory, or of a compiler.

    compile: what a run compiles its blocks with, if it does. Plain keyed mixing is then timed
    compiled, too: there is much to fuse in it.
    """
    if case.key_size:
        tensors, names = keyed_inputs(case, batch, dtype, device), KEYED_RESULTS
        calls = partial(keyed_step, compile=compile)
    else:
        tensors, names, calls = inputs(case, batch, dtype, device), RESULTS, step
    steps, found, reference, wanted = {}, Measured(), "", []
    for backend in reversed(backends):
        call = calls(tensors, backend)
        try:
            results = call()
            if wanted and (problem := difference(results, wanted, reference, names)):
                found.failures[backend] = problem
                continue
        except Exception as error:  # Triton's errors have no type of their own
            found.failures[backend] = first_line(error)
            continue
        steps[backend] = call
        if not wanted:
            reference, wanted = backend, results
        del results
    del wanted
    times = interleaved(steps) if steps else {}
    found.milliseconds = {name: times[name] for name in backends if name in times}
    return found


def inputs(case: Case, batch: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, weight, bias, residual and dy, the same in each call; the weight in fp32, as in training.
    The global random state stays as it is.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    shape = (batch, case.tokens, case.channels)
    weight = draw(case.heads, case.taps, case.tokens, case.tokens)
    weight *= (case.tokens * case.taps) ** -0.5
    bias = draw(case.heads, case.tokens)
    return [draw(*shape).to(dtype), weight, bias, draw(*shape).to(dtype), draw(*shape).to(dtype)]


def step(tensors: list[Tensor], backend: str) -> Callable[[], list[Tensor]]:
    """A forward and backward, which returns y and the gradients of x, weight and bias."""
    *leaves, residual, dy = tensors
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def call() -> list[Tensor]:
        y = triangular_conv(*leaves, residual, backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return call


def keyed_inputs(case: Case, batch: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """query, key, value, weight, bias and dy of keyed mixing, as `inputs`."""
    x, weight, bias, _, dy = inputs(case, batch, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    shape = (2, batch, case.tokens, case.heads * case.key_size)
    query, key = torch.randn(shape, device=device, generator=generator).to(dtype)
    return [query, key, x, weight, bias, dy]


def keyed_step(
    tensors: list[Tensor], backend: str, compile: Callable | None = None
) -> Callable[[], list[Tensor]]:
    """A forward and backward, which returns y and the gradients of the five inputs.

    backend: "cuda", the kernels whatever `keyed_conv` would choose, or "panels", plain PyTorch.
    """
    *leaves, dy = tensors
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    conv = compile(plain.keyed) if compile else plain.keyed
    if backend == "cuda":
        conv = by_kernels

    def call() -> list[Tensor]:
        y = conv(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return call


def by_kernels(*tensors: Tensor) -> Tensor:
    return torch.ops.mixer.keyed_conv(*tensors)[0]


def keyed_failure(
    device: torch.device, dtype: torch.dtype, heads: int, key: int, value: int
) -> str | None:
    """How the kernels of keyed mixing fail or are wrong on a device, for keys and values of so many
    numbers in each head; None if they are right. They are compiled for these sizes.
    """
    # Tokens that fill no tile but are a multiple of 16, for which the kernels are compiled.
    case = Case("", False, 0, tokens=208, channels=heads * value, heads=heads, taps=1, key_size=key)
    no_autocast = torch.autocast(device.type, enabled=False)
    try:
        with torch.inference_mode(False), torch.enable_grad(), no_autocast:
            tensors = keyed_inputs(case, 2, dtype, device)
            ours, wanted = (keyed_step(tensors, backend)() for backend in ("cuda", "panels"))
            return difference(ours, wanted, "plain PyTorch", KEYED_RESULTS)
    except Exception as error:  # Triton's errors have no type of their own
        return f"its kernels fail: {first_line(error)}"


def difference(
    results: list[Tensor], wanted: list[Tensor], reference: str, names: Sequence[str] = RESULTS
) -> str | None:
    """Which result is away from the reference's by more than rounding; None if none is."""
    for name, ours, theirs in zip(names, results, wanted, strict=True):
        apart = (norm(ours - theirs) / norm(theirs)).item()
        if not apart <= MOST_APART:  # NaN is no result either
            return (
                f"its results are wrong on this GPU: {name} is {apart:.1e} away from {reference}'s"
            )
    return None


def norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32)


def interleaved(steps: dict[str, Callable]) -> dict[str, float]:
    """Median milliseconds of each step, measured in turns, so that clocks and heat favour none."""
    first = {
        name: min(milliseconds(call, 1) for _ in range(LEAST_ROUNDS))
        for name, call in steps.items()
    }
    near = [name for name in steps if first[name] <= FAR_BEHIND * min(first.values())]
    counts = {name: max(1, int(ROUND_MS / first[name])) for name in near}
    round_ms = sum(counts[name] * first[name] for name in near)
    rounds = [
        {name: milliseconds(steps[name], counts[name]) for name in near}
        for _ in range(min(ROUNDS, max(LEAST_ROUNDS, int(ALL_MS / round_ms))))
    ]
    return first | {name: statistics.median(times[name] for times in rounds) for name in near}


def milliseconds(call: Callable, count: int) -> float:
    """GPU time of one of `count` calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count
