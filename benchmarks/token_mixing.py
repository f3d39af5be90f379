"""Token mixing alone: our kernels beside every way a user could write it.

    python benchmarks/token_mixing.py --output PATH [--suite main|sweep|both] \\
        [--tokens 512,2048] [--seconds 100]
    python benchmarks/token_mixing.py --plot PATH.json  # draws tables and picture again, anywhere

Writes PATH.json and PATH.md; with --plot PATH.md and PATH_speedup.png. `main` varies the context at
65,536 tokens and 1024 channels in bf16 (--dtype float16: a V100 has no bf16); `sweep` changes one
other factor at a time. Every variant is checked against fp64 first, and what fails
its check is not timed. Without CUDA kernels it compares `panels` with the alternatives, at any
size: --device cpu --tokens 64,128 --channels 32 --batch-tokens 256.
"""

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path

import timing
import torch
from saving import add_options, measured_by, save
from token_mixing_check import Expected, check
from token_mixing_figures import plot_speedups
from token_mixing_report import table
from token_mixing_variants import VARIANTS, Data
from token_mixing_work import OPERATIONS, Shape, floor_ms, least_bytes, useful_flops

from mixer.common.errors import UserError, run_command
from mixer.common.files import write_text
from mixer.ops import choice

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
        raise UserError(
            "give --output PATH for the results, or --plot PATH.json for a picture of earlier ones"
        )
    result = measure(options)
    print(table(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, required=False)
    parser.add_argument(
        "--plot", metavar="PATH.json", help="draw the picture of these results and measure nothing"
    )
    parser.add_argument("--suite", choices=("main", "sweep", "both"), default="main")
    parser.add_argument("--tokens", type=numbers, help="only these contexts, e.g. 512,2048")
    parser.add_argument(
        "--operations",
        type=lambda text: text.split(","),
        default=list(OPERATIONS),
        help="only these",
    )
    parser.add_argument("--channels", type=int, default=1024, help="channels of the base case")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="type of the base case"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=65536, help="batch x tokens of the base case"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no further shape after this long"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--batch-ms", type=float, default=4.0, help="length of a timed batch of calls"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu")
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="leave out what torch.compile makes of the alternatives",
    )
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


# ------------------------------------------------------------------------- suites


def shapes(options: argparse.Namespace) -> list[tuple[str, Shape]]:
    """(suite, shape) of everything that was asked for."""
    if unknown := set(options.operations) - set(OPERATIONS):
        raise UserError(
            f"--operations has {', '.join(sorted(unknown))}; allowed: {', '.join(OPERATIONS)}"
        )
    base = Shape(
        512, channels=options.channels, batch_tokens=options.batch_tokens, dtype=options.dtype
    )
    found = []
    if options.suite in ("main", "both"):
        chosen = options.tokens or MAIN_TOKENS
        found += [("main", dataclasses.replace(base, tokens=tokens)) for tokens in chosen]
    if options.suite in ("sweep", "both"):
        swept = sweep(base)
        found += [
            ("sweep", shape)
            for shape in swept
            if not options.tokens or shape.tokens in options.tokens
        ]
    if not found:
        raise UserError(f"no shape of suite {options.suite} has --tokens {options.tokens}")
    return found


def sweep(base: Shape) -> list[Shape]:
    """One factor changed at a time."""

    def changed(factor: str, **changes) -> Shape:
        return dataclasses.replace(base, factor=factor, **changes)

    found = [changed("base")]
    found += [changed("tokens", tokens=tokens) for tokens in (128, 256, 640, 1000, 1536)]
    found += [
        changed("channels", channels=int(base.channels * factor)) for factor in (1 / 4, 1 / 2, 2, 4)
    ]
    found += [changed("heads", heads=heads) for heads in (2, 4, 8)]
    found += [changed("kernel size", taps=taps) for taps in (3, 5)]
    counts = [int(base.batch_tokens * factor) for factor in (1 / 16, 1 / 4, 4)]
    for tokens in (512, 4096):
        found += [changed("batch x tokens", tokens=tokens, batch_tokens=count) for count in counts]
    found += [changed("dtype", dtype="float16")] if base.dtype != "float16" else []
    for tokens in (512, 2048):
        found += [
            changed("dtype", tokens=tokens, dtype="float32", tf32=tf32) for tf32 in (False, True)
        ]
    return found


# ------------------------------------------------------------------------- measuring


def measure(options: argparse.Namespace) -> dict:
    started = time.perf_counter()
    torch.manual_seed(0)
    ours = backend(options.device)
    planned = shapes(options)
    result = measured_by(options, options.device) | {"ours": ours, "left_out": []}
    result |= {"rounds": options.rounds, "batch_ms": options.batch_ms}
    result["ceiling_size"] = 8192 if options.device == "cuda" else 256
    result |= {
        "copy_tb_s": timing.copy_bytes_per_ms(options.device) / 1e9,
        "ceilings_tflops": {},
        "cases": [],
    }
    gc.collect()
    gc.freeze()  # each capture collects garbage, and need not look through what was imported
    for suite, shape in planned:
        if time.perf_counter() - started > options.seconds:
            result["left_out"].append({"suite": suite, **dataclasses.asdict(shape)})
            continue
        measure_shape(suite, shape, ours, options, result)
        result["seconds"] = round(time.perf_counter() - started, 1)
        print(f"{result['seconds']:7.1f} s  {suite} {shape}", flush=True)
        # After each shape: a run that is cut off leaves what it has.
        save(result, table(result), options.output)
    save(result, table(result), options.output)
    return result


def backend(device: str) -> str:
    """What is measured: the kernels on a GPU, or it is an error; on a CPU the panels."""
    if device == "cpu":
        return "panels"
    reason = choice.device_reason(0)
    if reason:
        raise UserError(f"nothing to measure: {reason}")
    return "cuda"


def measure_shape(
    suite: str, shape: Shape, ours: str, options: argparse.Namespace, result: dict
) -> None:
    timing.set_tf32(shape.tf32)
    ceilings = result["ceilings_tflops"]
    if shape.arithmetic not in ceilings:
        ceilings[shape.arithmetic] = timing.product_tflops(
            shape.torch_dtype, options.device, result["ceiling_size"]
        )
    data = Data(shape, options.device, ours)
    expected = Expected(data)
    for operation in OPERATIONS if suite == "main" else SWEEP_OPERATIONS:
        if operation not in options.operations:
            continue
        compiled = suite == "main" and options.device == "cuda" and not options.no_compile
        case = {
            "suite": suite,
            "operation": operation,
            **dataclasses.asdict(shape),
            "batch": shape.batch,
        }
        case |= {"slots": len(data.slots), "ceiling_tflops": ceilings[shape.arithmetic]}
        case |= {
            "useful_flops": useful_flops(shape, operation),
            "least_bytes": least_bytes(shape, operation),
        }
        case["floor_ms"] = floor_ms(
            shape, operation, result["copy_tb_s"] * 1e9, ceilings[shape.arithmetic]
        )
        case["variants"] = measure_operation(operation, data, expected, compiled, options)
        result["cases"].append(case)
    del data, expected
    torch.compiler.reset()  # a shape's compiled functions are not asked for again
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def measure_operation(
    operation: str, data: Data, expected: Expected, compiled: bool, options: argparse.Namespace
) -> list:
    """A row for each variant: how it did in its check and, where it passed, its times."""
    variants = VARIANTS[operation](data, compiled)
    wanted = expected(operation)
    rows = [
        {
            "name": variant.name,
            "family": variant.family,
            **check(variant, operation, expected, wanted),
        }
        for variant in variants
    ]
    del wanted
    calls = {
        variant.name: variant.call
        for variant, row in zip(variants, rows, strict=True)
        if not row["failure"]
    }
    if not calls:
        return rows
    slots = len(data.slots)
    eager = operation == "autograd"  # there the host counts; a graph tells what the GPU takes
    timings = timing.interleaved(
        calls, data.device, slots, options.rounds, options.batch_ms * (5 if eager else 1), not eager
    )
    calls = {name: call for name, call in calls.items() if "ms" in timings[name]}
    graphs = (
        timing.replayed(calls, slots, options.rounds, options.batch_ms)
        if eager and data.device == "cuda"
        else {}
    )
    for row in rows:
        row |= timings.get(row["name"], {})
        if eager:
            row["graph_ms"] = graphs.get(row["name"])
    return rows


if __name__ == "__main__":
    run_command(main)
