"""Token mixing alone: our kernels beside every way a user could write it.

    python benchmarks/token_mixing.py --output PATH [--suite main|sweep|both] \\
        [--tokens 512,2048]
    python benchmarks/token_mixing.py --plot PATH.json  # draws tables and picture again, anywhere

Writes PATH.json and PATH.md; with --plot PATH.md and PATH_speedup.png. `main` varies the context at
65,536 tokens and 1024 channels in bf16 (--dtype float16: a V100 has no bf16); `sweep` changes one
other factor at a time. Every variant is checked against fp64 first, and what fails
its check is not timed. Without a GPU, plain PyTorch takes the kernels' place, and the script can be
tried: --device cpu --tokens 64,128 --channels 32 --batch-tokens 256.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import time
from pathlib import Path

import timing
import torch
from plain_kernels import replacing_the_kernels
from saving import measured_by, names, numbers, parser_of, save
from token_mixing_check import check, exact
from token_mixing_report import plot_speedups, table
from token_mixing_variants import VARIANTS, Data, Shape, Variant

from mixer.common.errors import UserError, run_command
from mixer.common.files import write_text
from mixer.ops import selftest

MAIN_TOKENS = (512, 1024, 2048, 4096, 8192)
SWEEP_OPERATIONS = ("forward", "grad_input", "grad_weight", "autograd")


def main() -> None:
    options = arguments()
    if options.plot:
        path = Path(options.plot)
        result = json.loads(path.read_text())
        write_text(path.with_suffix(".md"), table(result))
        print(plot_speedups(result, path.with_name(f"{path.stem}_speedup.png")))
        return
    if not options.output:
        raise UserError("give --output PATH for the results, or --plot PATH.json of earlier ones")
    on_cpu = options.device == "cpu"
    with replacing_the_kernels() if on_cpu else contextlib.nullcontext():
        print(table(measure(options)))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, required=False)
    again = "draw these results again and measure nothing"
    parser.add_argument("--plot", metavar="PATH.json", help=again)
    parser.add_argument("--suite", choices=("main", "sweep", "both"), default="main")
    parser.add_argument("--tokens", type=numbers, help="only these contexts, e.g. 512,2048")
    parser.add_argument("--operations", type=names, default=[*VARIANTS], help="only these")
    parser.add_argument("--channels", type=int, default=1024, help="channels of the base case")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="type of the base case",
    )
    batch_tokens = "batch x tokens of the base case"
    parser.add_argument("--batch-tokens", type=int, default=65536, help=batch_tokens)
    parser.add_argument("--rounds", type=int, default=9)
    batch_ms = "length of a timed batch of calls"
    parser.add_argument("--batch-ms", type=float, default=4.0, help=batch_ms)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    return parser.parse_args()


# ------------------------------------------------------------------------- suites


def shapes(options: argparse.Namespace) -> list[tuple[str, Shape]]:
    """(suite, shape) of everything that was asked for."""
    unknown = ", ".join(sorted(set(options.operations) - set(VARIANTS)))
    if unknown:
        raise UserError(f"--operations has {unknown}; allowed: {', '.join(VARIANTS)}")
    base = Shape(512, options.channels, options.batch_tokens, dtype=options.dtype)
    planned = []
    if options.suite in ("main", "both"):
        for tokens in options.tokens or MAIN_TOKENS:
            planned.append(("main", dataclasses.replace(base, tokens=tokens)))
    if options.suite in ("sweep", "both"):
        for shape in sweep(base):
            if not options.tokens or shape.tokens in options.tokens:
                planned.append(("sweep", shape))
    if not planned:
        raise UserError(f"no shape of suite {options.suite} has --tokens {options.tokens}")
    return planned


def sweep(base: Shape) -> list[Shape]:
    """One factor changed at a time."""

    changed = functools.partial(dataclasses.replace, base)
    cases = [changed(factor="base")]
    for tokens in (128, 256, 640, 1000, 1536):
        cases.append(changed(factor="tokens", tokens=tokens))
    for scale in (1 / 4, 1 / 2, 2, 4):
        cases.append(changed(factor="channels", channels=int(base.channels * scale)))
    for heads in (2, 4, 8):
        cases.append(changed(factor="heads", heads=heads))
    for tokens in (512, 4096):
        for scale in (1 / 16, 1 / 4, 4):
            batch_tokens = int(base.batch_tokens * scale)
            case = changed(factor="batch x tokens", tokens=tokens, batch_tokens=batch_tokens)
            cases.append(case)
    if base.dtype != "float16":
        cases.append(changed(factor="dtype", dtype="float16"))
    return cases


# ------------------------------------------------------------------------- measuring


def measure(options: argparse.Namespace) -> dict:
    started = time.perf_counter()
    torch.manual_seed(0)
    timing.set_tf32(True)
    device = options.device
    planned = shapes(options)
    reason = selftest.fault(0) if device == "cuda" else None
    if reason:
        raise UserError(f"nothing to measure: {reason}")
    result = measured_by(options, device)
    result |= {"rounds": options.rounds, "batch_ms": options.batch_ms}
    result["ceiling_size"] = 8192 if device == "cuda" else 256
    result["copy_tb_s"] = timing.copy_bytes_per_ms(device) / 1e9
    result |= {"ceilings_tflops": {}, "cases": []}
    gc.collect()
    gc.freeze()  # each capture collects garbage, and need not look through what was imported
    for suite, shape in planned:
        measure_shape(suite, shape, options, result)
        result["seconds"] = round(time.perf_counter() - started, 1)
        print(f"{result['seconds']:7.1f} s  {suite} {shape}", flush=True)
        # After each shape: a run that is cut off leaves what it has.
        save(result, table(result), options.output)
    return result


def measure_shape(suite: str, shape: Shape, options: argparse.Namespace, result: dict) -> None:
    ceilings = result["ceilings_tflops"]
    if shape.arithmetic not in ceilings:
        size = result["ceiling_size"]
        tflops = timing.product_tflops(shape.torch_dtype, options.device, size)
        ceilings[shape.arithmetic] = tflops
    ceiling = ceilings[shape.arithmetic]
    data = Data(shape, options.device)
    for operation in VARIANTS if suite == "main" else SWEEP_OPERATIONS:
        if operation not in options.operations:
            continue
        case = {"suite": suite, "operation": operation, **dataclasses.asdict(shape)}
        case |= {"batch": shape.batch, "slots": len(data.slots), "ceiling_tflops": ceiling}
        case["useful_flops"] = useful_flops(shape, operation)
        case["least_bytes"] = least_bytes(shape, operation)
        case["floor_ms"] = floor_ms(shape, operation, result["copy_tb_s"] * 1e9, ceiling)
        case["variants"] = measure_operation(operation, data, suite == "main", options)
        result["cases"].append(case)
    del data
    torch.compiler.reset()  # a shape's compiled functions are not asked for again
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def measure_operation(
    operation: str, data: Data, compiled: bool, options: argparse.Namespace
) -> list[dict]:
    """A row for each variant: how it did in its check and, where it passed, its times."""
    variants, rows = checked(operation, data, compiled)
    calls = {}
    for variant, row in zip(variants, rows, strict=True):
        if not row["failure"]:
            calls[variant.name] = variant.call
    slots = len(data.slots)
    rounds = options.rounds
    eager = operation == "autograd"  # there the host counts; a graph tells what the GPU takes
    batch_ms = options.batch_ms * (5 if eager else 1)
    timings = timing.interleaved(calls, data.device, slots, rounds, batch_ms, not eager)
    graphs = {}
    if eager and data.device == "cuda":
        calls = {name: call for name, call in calls.items() if "ms" in timings[name]}
        graphs = timing.replayed(calls, slots, rounds, options.batch_ms)
    for row in rows:
        row |= timings.get(row["name"], {})
        if eager:
            row["graph_ms"] = graphs.get(row["name"])
    return rows


def checked(operation: str, data: Data, compiled: bool) -> tuple[list[Variant], list[dict]]:
    """The variants of an operation, and a row for each: how it did in its check."""
    variants = VARIANTS[operation](data, compiled)
    of_full_weight = exact(operation, data)
    rows = []
    for variant in variants:
        expected = of_full_weight
        if variant.family == "by lag":
            expected = exact(operation, data, by_lag=True)
        row = {"name": variant.name, "family": variant.family}
        rows.append(row | check(variant, operation, expected, data))
    return variants, rows


# ------------------------------------------------------------------------- the least there is to do


def useful_flops(shape: Shape, operation: str) -> int:
    """Two for each product on or below the diagonal."""
    product = shape.batch * shape.channels * shape.tokens * (shape.tokens + 1)
    return {"pack": 0, "autograd": 3}.get(operation, 1) * product


def least_bytes(shape: Shape, operation: str) -> int:
    """Every input read once and every output written once; of a weight that is read, the lower
    triangle.
    """
    squares = shape.heads * shape.tokens**2
    triangles = shape.heads * shape.tokens * (shape.tokens + 1) // 2
    size = shape.torch_dtype.itemsize
    product = 2 * shape.activation_bytes + triangles * size
    gradient = 2 * shape.activation_bytes + squares * 4
    pack = triangles * 4 + squares * size
    return {
        "forward": product,
        "grad_input": product,
        "grad_weight": gradient,
        "fused": product + shape.activation_bytes,
        "pack": pack,
        "autograd": pack + 2 * product + gradient,
    }[operation]


def floor_ms(shape: Shape, operation: str, bytes_per_ms: float, tflops: float) -> float:
    """No implementation that skips in steps of 64 rows is faster: the slower of memory and
    arithmetic, both as measured.
    """
    if operation == "autograd":
        passes = ("pack", "forward", "grad_input", "grad_weight")
        return sum(floor_ms(shape, one_pass, bytes_per_ms, tflops) for one_pass in passes)
    pairs = sum(min(row // 64 * 64 + 64, shape.tokens) for row in range(shape.tokens))
    flops = 2 * shape.batch * shape.channels * pairs
    arithmetic = 0.0 if operation == "pack" else flops / (tflops * 1e9)
    return max(least_bytes(shape, operation) / bytes_per_ms, arithmetic)


if __name__ == "__main__":
    run_command(main)
