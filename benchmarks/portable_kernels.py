"""The kernels for older GPUs on a newer one, beside cuBLAS and beside the most that such kernels
reach there.

    # needs NVRTC of CUDA 12, but no GPU
    python benchmarks/portable_kernels.py --write-ptx build/portable
    # on the GPU; writes PATH.json, PATH.md
    python benchmarks/portable_kernels.py --ptx build/portable --output PATH

Those for Ampere are built for the GPU at hand and told that it has compute capability 8.0. Those
for Volta come as PTX for compute_70, which CUDA 12 has made and the driver compiles; without --ptx
they are left out. What they are measured by is the same source with the triangle taken out
(portable_dense.py), on a dense product of --ceiling-size cubed. Every result is checked against
fp64 before it is timed.
"""

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import timing
import torch
from portable_dense import build_library, write_sources
from saving import add_options, measured_by, origin, save
from token_mixing_check import MAX_ERROR, Expected, check, rmse
from token_mixing_report import markdown, number, of_family, speedup
from token_mixing_variants import VARIANTS, Data
from token_mixing_work import OPERATIONS, Shape, useful_flops

from mixer.common.errors import UserError, run_command
from mixer.ops import choice, cuda

ROOT = Path(__file__).parent.parent
TOKENS = (1024, 2048, 4096, 8192)
TIMED = ("forward", "grad_input", "grad_weight")
# of each set of kernels, by compute capability
DTYPES = {80: ("bfloat16", "float16"), 70: ("float16",)}
DENSE_PTX_FILES = ("volta_forward", "volta_grad_input")
# ptx_library and nvrtc, which the tests of these kernels use as well
sys.path.append(str(ROOT / "tests/helpers"))


def main() -> None:
    options = arguments()
    if options.write_ptx:
        write_ptx(Path(options.write_ptx))
        return
    if not options.output:
        raise UserError(
            "give --output PATH for the results, or --write-ptx DIRECTORY to make the PTX for --ptx"
        )
    if reason := choice.unavailable_reason():
        raise UserError(f"nothing to measure: {reason}")
    print(table(measure(options)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, required=False)
    parser.add_argument(
        "--write-ptx", metavar="DIRECTORY", help="compile the PTX, and measure nothing"
    )
    parser.add_argument(
        "--ptx",
        metavar="DIRECTORY",
        help="what --write-ptx wrote; without it the sm_70 kernels are left out",
    )
    parser.add_argument(
        "--tokens", type=lambda text: [int(part) for part in text.split(",")], default=TOKENS
    )
    parser.add_argument("--channels", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument(
        "--ceiling-size",
        type=int,
        default=8192,
        help="rows, columns and depth of the dense product",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--batch-ms", type=float, default=4.0, help="length of a timed batch of calls"
    )
    return parser.parse_args()


# ------------------------------------------------------------------------- kernels to force


def write_ptx(directory: Path) -> None:
    """PTX of all kernels in `directory`/triangle, of dense forms of them in `directory`/dense."""
    import nvrtc

    dense = write_sources(directory / "sources")
    nvrtc.write_ptx(nvrtc.sources(), directory / "triangle")
    nvrtc.write_ptx([dense / f"{name}.cu" for name in DENSE_PTX_FILES], directory / "dense")


def libraries(options: argparse.Namespace) -> dict[int, tuple]:
    """(the library, the same with dense products) of each set of kernels that can be measured
    here.
    """
    import ptx_library

    ours = cuda.kernels(0)
    dense = build_library(
        ROOT / "build" / "portable" / "sm_80", torch.cuda.get_device_capability(0)
    )
    found = {80: (ours, cuda.load(str(dense)))}
    if options.ptx:
        folders = [Path(options.ptx) / name for name in ("triangle", "dense")]
        found[70] = tuple(ptx_library.load(ours, folder, device=0) for folder in folders)
    return found


@contextlib.contextmanager
def forced(library, capability: int) -> Iterator[None]:
    """mixer.ops.cuda calls this library, and its kernels for this compute capability."""
    facts = (capability, cuda.device_facts(0)[1])
    with mock.patch.multiple(cuda, kernels=lambda index: library, device_facts=lambda index: facts):
        cuda.template.cache_clear()
        yield
    cuda.template.cache_clear()


# ------------------------------------------------------------------------- measuring


def measure(options: argparse.Namespace) -> dict:
    started = time.perf_counter()
    torch.manual_seed(0)
    found = libraries(options)
    result = measured_by(options)
    result |= {
        "rounds": options.rounds,
        "batch_ms": options.batch_ms,
        "ceiling_size": options.ceiling_size,
    }
    result |= {
        "build_seconds": round(time.perf_counter() - started, 1),
        "ceilings_tflops": {},
        "cases": [],
    }
    for capability, (library, dense) in found.items():
        for dtype in DTYPES[capability]:
            ceilings = measure_ceilings(dense, capability, dtype, options)
            result["ceilings_tflops"][f"sm_{capability} {dtype}"] = ceilings
            for tokens in options.tokens:
                shape = Shape(
                    tokens,
                    channels=options.channels,
                    batch_tokens=options.batch_tokens,
                    dtype=dtype,
                )
                with forced(library, capability):
                    result["cases"] += measure_shape(
                        shape, capability, max(ceilings["forward"], ceilings["grad_input"]), options
                    )
                result["seconds"] = round(time.perf_counter() - started, 1)
                print(f"{result['seconds']:7.1f} s  sm_{capability} {shape}", flush=True)
                save(result, table(result), options.output)
    return result


def measure_ceilings(
    dense, capability: int, dtype: str, options: argparse.Namespace
) -> dict[str, float]:
    """TFLOP/s of the dense products W x and W^T dy by our kernels, and of cuBLAS. Raises UserError
    where ours are wrong.
    """
    size, torch_dtype = options.ceiling_size, getattr(torch, dtype)
    channels = min(size, options.channels)
    x = torch.randn(size // channels, size, channels, device="cuda", dtype=torch_dtype)
    weight = torch.randn(1, 1, size, size, device="cuda", dtype=torch_dtype) * size**-0.5
    calls = {
        "forward": (lambda _: cuda.forward(x, weight, None, None), weight[0, 0]),
        "grad_input": (lambda _: cuda.grad_input(x, weight), weight[0, 0].t()),
    }
    with forced(dense, capability):
        for name, (call, matrix) in calls.items():
            if not (error := rmse(call(0)[-1], matrix.double() @ x[-1].double())) < MAX_ERROR:
                raise UserError(
                    f"the dense {name} of sm_{capability}, {dtype}, is wrong: relative RMSE "
                    f"{error:.2g}"
                )
        timed = {name: call for name, (call, _) in calls.items()}
        timings = timing.interleaved(timed, "cuda", 1, options.rounds, 4 * options.batch_ms)
    found = {
        name: 2e-9 * size**2 * x.shape[0] * channels / row["ms"] for name, row in timings.items()
    }
    return found | {"cublas": timing.product_tflops(torch_dtype, "cuda", size)}


def measure_shape(
    shape: Shape, capability: int, ceiling: float, options: argparse.Namespace
) -> list[dict]:
    data = Data(shape, "cuda", "cuda")
    expected = Expected(data)
    cases = []
    for operation in TIMED:
        variants = [
            variant
            for variant in VARIANTS[operation](data, False)
            if variant.family in ("ours", "dense")
        ]
        wanted = expected(operation)
        rows = [
            {"name": v.name, "family": v.family, **check(v, operation, expected, wanted)}
            for v in variants
        ]
        calls: dict[str, Callable] = {
            v.name: v.call for v, row in zip(variants, rows, strict=True) if not row["failure"]
        }
        timings = timing.interleaved(
            calls, "cuda", len(data.slots), options.rounds, options.batch_ms
        )
        for row in rows:
            row |= timings.get(row["name"], {})
        case = {
            "capability": capability,
            "operation": operation,
            "tokens": shape.tokens,
            "dtype": shape.dtype,
        }
        case |= {"batch": shape.batch, "channels": shape.channels, "ceiling_tflops": ceiling}
        cases.append(case | {"useful_flops": useful_flops(shape, operation), "variants": rows})
    del data, expected
    gc.collect()
    torch.cuda.empty_cache()
    return cases


# ------------------------------------------------------------------------- table


def table(result: dict) -> str:
    device = result["hardware"]["device"]
    parts = [f"# Kernels for older GPUs on {device}", introduction(result)]
    for name, ceilings in result["ceilings_tflops"].items():
        capability, dtype = name.removeprefix("sm_").split()
        cases = [
            case
            for case in result["cases"]
            if (str(case["capability"]), case["dtype"]) == (capability, dtype)
        ]
        rates = ", ".join(f"{label} {ceilings[key]:.4g}" for key, label in CEILINGS.items())
        parts += [
            f"## sm_{capability} kernel on {device}, {dtype}",
            f"Dense products, TFLOP/s: {rates}.",
            rows_of(cases),
        ]
    parts += [f"Measured on {origin(result)}."]
    return "\n\n".join(parts) + "\n"


CEILINGS = {"forward": "these kernels W x", "grad_input": "and Wᵀ x", "cublas": "cuBLAS"}


def introduction(result: dict) -> str:
    case = result["cases"][0]
    size = f"{result['ceiling_size']:,}"
    return (
        f"{case['channels']} channels, batch x tokens {case['batch'] * case['tokens']:,}; "
        f"milliseconds, medians of {result['rounds']} interleaved rounds, GPU time alone. Useful "
        "operations are those on and below the diagonal. The ceiling is the faster of two dense "
        f"products of {size} cubed by the same kernels with the triangle taken out. cuBLAS "
        "multiplies the whole square, with the GPU's own instructions. Results were first checked "
        "against fp64; what failed has no time."
    )


def rows_of(cases: list[dict]) -> str:
    head = [
        "",
        "tokens",
        "ms",
        "useful TFLOP/s",
        "% of the ceiling",
        "cuBLAS, ms",
        "cuBLAS, useful TFLOP/s",
        "times as fast",
    ]
    rows = []
    for case in sorted(cases, key=lambda case: (TIMED.index(case["operation"]), case["tokens"])):
        ours, dense = (of_family(case, family) for family in ("ours", "dense"))
        rates = [row and case["useful_flops"] / row["ms"] / 1e9 for row in (ours, dense)]
        share = rates[0] and 100 * rates[0] / case["ceiling_tflops"]
        cells = [number(ours and ours["ms"]), number(rates[0], ".4g"), number(share, ".0f")]
        cells += [
            number(dense and dense["ms"]),
            number(rates[1], ".4g"),
            number(speedup(case, over="dense"), ".2f"),
        ]
        rows.append([OPERATIONS[case["operation"]], str(case["tokens"]), *cells])
    return markdown(head, rows)


if __name__ == "__main__":
    run_command(main)
