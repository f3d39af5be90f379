"""Measures our CUDA kernels against panels on this machine's GPU; backend `auto` then takes the
faster one:

    python -m mixer.ops.tune

It takes a minute or two. A forward and backward of each case is timed with bias and residual, after
a check that both backends agree. `auto` looks up the measured case nearest to its own.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from mixer.common.errors import UserError, run_command
from mixer.ops import build, choice, cuda, timings, triangular_conv
from mixer.ops.timings import Case, Row

BATCH_TOKENS = 32768
SIZES = itertools.product((128, 256, 512, 1024, 2048), (256, 1024))  # tokens, channels
SHAPES = [  # (tokens, channels, heads, taps)
    *((tokens, channels, 1, 1) for tokens, channels in SIZES),
    *((tokens, 1024, heads, taps) for tokens in (512, 2048) for heads, taps in ((4, 1), (1, 3))),
]
BACKENDS = ("cuda", "panels")
ROUNDS = 7
ROUND_MS = 5.0
MOST_APART = 2e-2  # relative: both backends round to the type, panels once more for each addition


def types(capability: int) -> list[tuple[torch.dtype, bool]]:
    """The (dtype, whether as tf32) that a GPU has: before 8.0 there is neither bf16 nor tf32."""
    if capability < 80:
        return [(torch.float16, False), (torch.float32, False)]
    return [
        (torch.float16, False),
        (torch.bfloat16, False),
        (torch.float32, False),
        (torch.float32, True),
    ]


# ------------------------------------------------------------------------- measuring


def measure(case: Case, dtype: torch.dtype, device: torch.device) -> Row:
    """Raises UserError where the kernels' results are wrong: their time then means nothing."""
    steps = {backend: step(inputs(case, dtype, device), backend) for backend in BACKENDS}
    results = {backend: [value.double() for value in call()] for backend, call in steps.items()}
    for name, ours, theirs in zip(("y", "dx", "dweight", "dbias"), *results.values(), strict=True):
        apart = ((ours - theirs).norm() / theirs.norm()).item()
        if not apart <= MOST_APART:  # NaN is no result either
            raise UserError(
                f"the kernels are wrong on this GPU: {name} is {apart:.1e} away from that of "
                f"panels, for {case}. Use model.mixing_backend=panels, and report what "
                "`python -m pytest tests/ops/test_ops_cuda.py` prints."
            )
    del results
    times = interleaved(steps)
    batch = max(1, BATCH_TOKENS // case.tokens)
    return Row(**vars(case), batch=batch, cuda_ms=times["cuda"], panels_ms=times["panels"])


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, weight, bias, residual and dy, the same for each backend; the weight in fp32, as in
    training.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    shape = (max(1, BATCH_TOKENS // case.tokens), case.tokens, case.channels)
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


def interleaved(steps: dict[str, Callable]) -> dict[str, float]:
    """Median milliseconds of each step, measured in turns, so that clocks and heat favour none."""
    counts = {name: max(1, int(ROUND_MS / milliseconds(call, 2))) for name, call in steps.items()}
    rounds = [
        {name: milliseconds(call, counts[name]) for name, call in steps.items()}
        for _ in range(ROUNDS)
    ]
    return {name: statistics.median(times[name] for times in rounds) for name in steps}


def milliseconds(call: Callable, count: int) -> float:
    """GPU time of one of `count` calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def measure_all(device: torch.device) -> list[Row]:
    """All cases, each printed when it is measured."""
    before, rows = torch.get_float32_matmul_precision(), []
    try:
        for dtype, tf32 in types(cuda.device_facts(device.index)[0]):
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            for tokens, channels, heads, taps in SHAPES:
                case = choice.case_of(device.index, dtype, tf32, tokens, channels, heads, taps)
                rows.append(measure(case, dtype, device))
                print(line(rows[-1]), flush=True)
    finally:
        torch.set_float32_matmul_precision(before)
    return rows


# ------------------------------------------------------------------------- the table

COLUMNS = [
    *("type", "batch", "tokens", "channels", "heads", "kernel size"),
    *("cuda ms", "panels ms", "auto takes"),
]
WIDTHS = [15 if column == "type" else len(column) for column in COLUMNS]


def cells(row: Row) -> list[str]:
    name = f"{row.dtype} as tf32" if row.tf32 else row.dtype
    sizes = map(str, (row.batch, row.tokens, row.channels, row.heads, row.taps))
    return [name, *sizes, f"{row.cuda_ms:.3f}", f"{row.panels_ms:.3f}", row.faster]


def line(row: Row) -> str:
    return aligned(cells(row))


def heading() -> str:
    return aligned(COLUMNS)


def aligned(texts: list[str]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(texts, WIDTHS, strict=True))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.ops.tune", description="Measure cuda against panels on this GPU."
    )
    parser.parse_args(arguments)
    if reason := choice.unavailable_reason():
        raise UserError(f"there is nothing to measure: {reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    build.cache_directory()  # an error now, not after measuring
    print(heading())
    rows = measure_all(device)
    path = choice.table_path(device.index)
    facts = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "kernels": cuda.build_name(device.index),
    }
    timings.write(path, rows, facts)
    print(f"written to {path}: backend 'auto' goes by it from now on")


if __name__ == "__main__":
    run_command(main)
