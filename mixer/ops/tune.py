"""Measures our CUDA kernels against panels and the dense product on this machine's GPU; backend
`auto` then goes by these times:

    python -m mixer.ops.tune

It takes a minute or two. A forward and backward of each case is timed with bias and residual, after
a check that the backends agree. A call takes the faster one of cuda and panels in the measured case
nearest to its own. A training run takes the fastest of the three, if its own case was measured.
"""

import argparse
import itertools

import torch

from mixer.common.errors import UserError, run_command
from mixer.ops import build, choice, cuda, timings
from mixer.ops.measure import time_backends
from mixer.ops.timings import Case, Row

BATCH_TOKENS = 32768
SIZES = itertools.product((128, 256, 512, 1024, 2048), (256, 1024))  # tokens, channels
SHAPES = [  # (tokens, channels, heads, taps)
    *((tokens, channels, 1, 1) for tokens, channels in SIZES),
    *((tokens, 1024, heads, taps) for tokens in (512, 2048) for heads, taps in ((4, 1), (1, 3))),
]
BACKENDS = ("cuda", "panels", "dense")


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
    """Raises UserError where a backend does not run, or its results are wrong: its time then means
    nothing.
    """
    batch = max(1, BATCH_TOKENS // case.tokens)
    found = time_backends(case, batch, dtype, device, BACKENDS)
    for backend, failure in found.failures.items():
        raise UserError(
            f"{backend} cannot be timed: {failure}, for {case}. Use model.mixing_backend=panels, "
            "and report what `python -m pytest tests/ops/test_ops_cuda.py` prints."
        )
    times = {f"{backend}_ms": ms for backend, ms in found.milliseconds.items()}
    return Row(**vars(case), batch=batch, **times)


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
    *("cuda ms", "panels ms", "dense ms", "auto takes", "a run takes"),
]
WIDTHS = [15 if column == "type" else len(column) for column in COLUMNS]


def cells(row: Row) -> list[str]:
    name = f"{row.dtype} as tf32" if row.tf32 else row.dtype
    sizes = map(str, (row.batch, row.tokens, row.channels, row.heads, row.taps))
    times = [f"{row.cuda_ms:.3f}", f"{row.panels_ms:.3f}", f"{row.dense_ms:.3f}"]
    return [name, *sizes, *times, row.faster, row.fastest]


def line(row: Row) -> str:
    return aligned(cells(row))


def heading() -> str:
    return aligned(COLUMNS)


def aligned(texts: list[str]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(texts, WIDTHS, strict=True))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.ops.tune",
        description="Measure the backends of the operator on this GPU.",
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
