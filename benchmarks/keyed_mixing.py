"""Times keyed mixing by its kernels and by plain PyTorch, beside attention and a convolution alone.

    python benchmarks/keyed_mixing.py --output PATH              # writes PATH.json, PATH.md
    python benchmarks/keyed_mixing.py --output PATH --tiles      # and looks for better tiles

bf16 with weights in float32, 65,536 tokens. Every result of the kernels is checked against plain
PyTorch first. --tiles also times each kernel with other sizes of tile, numbers of warps and of
loads under way, at the first two shapes. The best are for the tables of tiles in
mixer/ops/keyed_kernels.py, with which the times of the report are measured.
"""

import argparse
import itertools
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from saving import add_options, measured_by, origin, save
from timing import interleaved
from torch import Tensor

from mixer.common.errors import UserError, run_command
from mixer.models.masked_mixer import plain
from mixer.ops import choice, keyed_conv, triangular_conv
from mixer.ops.measure import KEYED_RESULTS, difference

DEVICE = "cuda"
TOKENS = 65536
# (context, heads, numbers of a key and of a value)
SHAPES = [
    (512, 8, 64),
    (512, 4, 128),
    (512, 16, 64),
    (2048, 8, 64),
    (2048, 4, 128),
    (8192, 8, 64),
    (8192, 4, 128),
]
TILED = SHAPES[:2]
NAMES = {
    "kernels": "kernels",
    "plain": "plain PyTorch",
    "compiled": "compiled",
    "attention": "softmax attention (SDPA)",
    "convolution": "triangular convolution alone",
}
ROUNDS, BATCH_MS = 9, 20.0
EDGES, WARPS, STAGES = (32, 64, 128), (4, 8), (2, 3)  # each compiles for a second


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", action="store_true", help="look for better tiles, too")
    add_options(parser)
    options = parser.parse_args()
    context, heads, size = SHAPES[0]
    reason = choice.keyed_unavailable_reason(
        torch.device(DEVICE, 0), torch.bfloat16, heads, size, size, context
    )
    if reason:
        raise UserError(f"nothing to measure: {reason}")
    result = measured_by(options) | {"tiles": {}, "rows": []}
    if options.tiles:
        result["tiles"] = {str(size): times_by_tile(*rest, size) for *rest, size in TILED}
    for shape in SHAPES:
        result["rows"] += rows(*shape)
        save(result, table(result), options.output)
    print(table(result))


def inputs(context: int, heads: int, size: int) -> list[Tensor]:
    """query, key, value, weight, bias and dy; the first three as parts of one projection."""
    torch.manual_seed(0)
    batch, width = max(1, TOKENS // context), heads * size
    projected = torch.randn(batch, context, 3 * width, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(heads, 1, context, context, device=DEVICE) * context**-0.5
    bias = torch.randn(heads, context, device=DEVICE)
    dy = torch.randn(batch, context, width, device=DEVICE, dtype=torch.bfloat16)
    return [*projected.chunk(3, dim=-1), weight, bias, dy]


def mixings(heads: int) -> dict[str, Callable]:
    """Calls with query, key, value, weight and bias."""

    def attention(query, key, value, weight, bias):
        parts = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return y.transpose(1, 2).flatten(2)

    return {
        "kernels": lambda *tensors: keyed_conv(*tensors, backend="cuda"),
        "plain": plain.keyed,
        "compiled": torch.compile(plain.keyed, dynamic=False),
        "attention": attention,
        "convolution": lambda _, __, value, weight, bias: triangular_conv(value, weight, bias),
    }


def rows(context: int, heads: int, size: int) -> list[dict]:
    *tensors, dy = inputs(context, heads, size)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    calls = mixings(heads)

    def results(conv: Callable) -> list[Tensor]:
        y = conv(*leaves)
        gradients = torch.autograd.grad(y, leaves, dy, allow_unused=True)
        return [y.detach(), *gradients]

    checked = results(calls["kernels"]), results(calls["plain"])
    if problem := difference(*checked, "plain PyTorch", KEYED_RESULTS):
        raise UserError(f"context {context}: {problem}")
    del checked

    @torch.no_grad()
    def forward(conv: Callable) -> Tensor:
        return conv(*tensors)

    found = []
    for name, step in (("forward", forward), ("forward and backward", results)):
        timed = {key: lambda _, conv=conv, step=step: step(conv) for key, conv in calls.items()}
        times = interleaved(timed, DEVICE, 1, ROUNDS, BATCH_MS)
        about = {"context": context, "heads": heads, "size": size, "pass": name}
        found.append(about | {"times": times})
        print(cells(found[-1]), flush=True)
    return found


def times_by_tile(context: int, heads: int, size: int) -> dict[str, dict]:
    """Of each kernel: milliseconds by rows, columns, warps and stages."""
    from mixer.ops import keyed_kernels as kernels

    query, key, value, weight, bias, dy = inputs(context, heads, size)
    tiles = kernels.tiles_for(query, size, size)
    packed = kernels.pack(weight, context, query.dtype)

    def gradients(_):  # of both kernels, of which one stays as it is
        return kernels.grad_input(dy, query, key, value, packed)

    calls = {
        "forward": lambda _: kernels.forward(query, key, value, packed, bias),
        "grad_query": gradients,
        "grad_key_value": gradients,
        "grad_weight": lambda _: kernels.grad_weight(dy, query, key, value, heads, context),
    }
    found = {}
    for kernel, call in calls.items():
        found[kernel], kept = {}, tiles[kernel]
        others = itertools.product(EDGES, EDGES, WARPS, STAGES)
        for tile in dict.fromkeys([kept, *others]):
            tiles[kernel] = tile
            with suppress(Exception):  # more shared memory or registers than there are
                timing = interleaved({"": call}, DEVICE, 1, 3, 3.0)[""]
                found[kernel][" ".join(map(str, tile))] = timing["ms"]
        tiles[kernel] = kept
        best = min(found[kernel], key=found[kernel].get)
        print(f"{kernel}, {size}: {best}, {found[kernel][best]:.3f} ms", flush=True)
    return found


def cells(row: dict) -> str:
    times = (row["times"][name].get("ms") for name in NAMES)
    numbers = " | ".join("-" if ms is None else f"{ms:.3f}" for ms in times)
    about = " | ".join(str(row[key]) for key in ("context", "heads", "size", "pass"))
    return f"| {about} | {numbers} |"


def table(result: dict) -> str:
    lines = [
        "# Keyed mixing: milliseconds of one call",
        "",
        f"{TOKENS:,} tokens, bf16. Size: numbers of a key and of a value. {origin(result)}",
        "",
        f"| context | heads | size | pass | {' | '.join(NAMES.values())} |",
        f"|---:|---:|---:|---|{'---:|' * len(NAMES)}",
        *map(cells, result["rows"]),
    ]
    for size, kernels in result["tiles"].items():
        for kernel, times in kernels.items():
            fastest = sorted(times, key=times.get)[:4]
            said = ", ".join(f"{tile}: {times[tile]:.3f} ms" for tile in fastest)
            lines += ["", f"Tiles of {kernel}, {size} (rows, columns, warps, stages): {said}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_command(main)
