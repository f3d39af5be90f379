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
from mixer.ops import cuda

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
    add = parser.add_argument
    add("--plot", metavar="PATH.json", help="draw these results again and measure nothing")
    add("--suite", choices=("main", "sweep", "both"), default="main")
    add("--tokens", type=numbers, help="only these contexts, e.g. 512,2048")
    add("--operations", type=names, default=[*VARIANTS], help="only these")
    add("--channels", type=int, default=1024, help="channels of the base case")
    types = ("bfloat16", "float16")
    add("--dtype", choices=types, default="bfloat16", help="type of the base case")
    add("--batch-tokens", type=int, default=65536, help="batch x tokens of the base case")
    add("--rounds", type=int, default=9)
    add("--batch-ms", type=float, default=4.0, help="length of a timed batch of calls")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, choices=("cuda", "cpu"))
    return parser.parse_args()


# ------------------------------------------------------------------------- suites


def shapes(options: argparse.Namespace) -> list[tuple[str, Shape]]:
    """(suite, shape) of everything that was asked for."""
    if unknown := set(options.operations) - set(VARIANTS):
        said = ", ".join(sorted(unknown))
        raise UserError(f"--operations has {said}; allowed: {', '.join(VARIANTS)}")
    base = Shape(512, options.channels, options.batch_tokens, dtype=options.dtype)
    found = []
    if options.suite in ("main", "both"):
        chosen = options.tokens or MAIN_TOKENS
        found += [("main", dataclasses.replace(base, tokens=tokens)) for tokens in chosen]
    if options.suite in ("sweep", "both"):
        wanted = [one for one in sweep(base) if not options.tokens or one.tokens in options.tokens]
        found += [("sweep", shape) for shape in wanted]
    if not found:
        raise UserError(f"no shape of suite {options.suite} has --tokens {options.tokens}")
    return found


def sweep(base: Shape) -> list[Shape]:
    """One factor changed at a time."""

    def changed(factor: str, **changes) -> Shape:
        return dataclasses.replace(base, factor=factor, **changes)

    def scaled(name: str, *factors: float) -> list[int]:
        return [int(getattr(base, name) * factor) for factor in factors]

    found = [changed("base")]
    found += [changed("tokens", tokens=tokens) for tokens in (128, 256, 640, 1000, 1536)]
    found += [changed("channels", channels=n) for n in scaled("channels", 1 / 4, 1 / 2, 2, 4)]
    found += [changed("heads", heads=heads) for heads in (2, 4, 8)]
    for tokens in (512, 4096):
        for count in scaled("batch_tokens", 1 / 16, 1 / 4, 4):
            found.append(changed("batch x tokens", tokens=tokens, batch_tokens=count))
    return found + ([changed("dtype", dtype="float16")] if base.dtype != "float16" else [])


# ------------------------------------------------------------------------- measuring


def measure(options: argparse.Namespace) -> dict:
    started = time.perf_counter()
    torch.manual_seed(0)
    timing.set_tf32(True)
    device, planned = options.device, shapes(options)
    if device == "cuda" and (reason := cuda.device_reason(0)):
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
    ceilings, kind = result["ceilings_tflops"], shape.arithmetic
    if kind not in ceilings:
        size = options.device, result["ceiling_size"]
        ceilings[kind] = timing.product_tflops(shape.torch_dtype, *size)
    data = Data(shape, options.device)
    for operation in VARIANTS if suite == "main" else SWEEP_OPERATIONS:
        if operation not in options.operations:
            continue
        case = {"suite": suite, "operation": operation, **dataclasses.asdict(shape)}
        case |= {"batch": shape.batch, "slots": len(data.slots), "ceiling_tflops": ceilings[kind]}
        case["useful_flops"] = useful_flops(shape, operation)
        case["least_bytes"] = least_bytes(shape, operation)
        case["floor_ms"] = floor_ms(shape, operation, result["copy_tb_s"] * 1e9, ceilings[kind])
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
    pairs = zip(variants, rows, strict=True)
    calls = {variant.name: variant.call for variant, row in pairs if not row["failure"]}
    slots, rounds, ms = len(data.slots), options.rounds, options.batch_ms
    eager = operation == "autograd"  # there the host counts; a graph tells what the GPU takes
    longer = ms * (5 if eager else 1)
    timings = timing.interleaved(calls, data.device, slots, rounds, longer, not eager)
    calls = {name: call for name, call in calls.items() if "ms" in timings[name]}
    on_gpu = eager and data.device == "cuda"
    graphs = timing.replayed(calls, slots, rounds, ms) if on_gpu else {}
    for row in rows:
        row |= timings.get(row["name"], {})
        if eager:
            row["graph_ms"] = graphs.get(row["name"])
    return rows


def checked(operation: str, data: Data, compiled: bool) -> tuple[list[Variant], list[dict]]:
    """The variants of an operation, and a row for each: how it did in its check."""
    variants, rows, full = VARIANTS[operation](data, compiled), [], exact(operation, data)
    for one in variants:
        wanted = exact(operation, data, by_lag=True) if one.family == "by lag" else full
        found = check(one, operation, wanted, data)
        rows.append({"name": one.name, "family": one.family, **found})
    return variants, rows


# ------------------------------------------------------------------------- the least there is to do


def useful_flops(shape: Shape, operation: str) -> int:
    """Two for each product on or below the diagonal."""
    one = shape.batch * shape.channels * shape.tokens * (shape.tokens + 1)
    return {"pack": 0, "autograd": 3}.get(operation, 1) * one


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
        parts = ("pack", "forward", "grad_input", "grad_weight")
        return sum(floor_ms(shape, part, bytes_per_ms, tflops) for part in parts)
    pairs = sum(min(row // 64 * 64 + 64, shape.tokens) for row in range(shape.tokens))
    flops = 2 * shape.batch * shape.channels * pairs
    arithmetic = 0.0 if operation == "pack" else flops / (tflops * 1e9)
    return max(least_bytes(shape, operation) / bytes_per_ms, arithmetic)


if __name__ == "__main__":
    run_command(main)
