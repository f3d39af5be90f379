"""What a run with model.mixing_backend=auto chooses before its first step, and whether that is
right: with the GPU's own kernels, and with those for older GPUs in their place.

    # needs NVRTC of CUDA 12, but no GPU
    python benchmarks/portable_kernels.py --write-ptx build/portable
    # on the GPU; writes PATH.json, PATH.md
    python benchmarks/auto_choice.py --ptx build/portable --output PATH

Each row is what a run does: a short race of cuda, panels and dense on its shapes. Then all three
are timed for much longer. `behind` is the time of the chosen one as a multiple of the fastest's.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path

import torch
from portable_kernels import forced
from saving import add_options, measured_by, origin, save

from mixer.common.errors import UserError, run_command
from mixer.ops import choice, cuda
from mixer.ops.measure import inputs, milliseconds, step
from mixer.training.mixing import CANDIDATES, Workload, race

SHAPES = [  # (batch, tokens, channels, heads, taps)
    *((batch, 65536 // batch, 1024, 1, 1) for batch in (128, 64, 32, 16, 8)),
    *((32, 512, 1024, heads, taps) for heads, taps in ((1, 1), (8, 1), (1, 3))),
    (8, 128, 256, 1, 1),
]
LONG_ROUNDS = 15
LONG_ROUND_MS = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--ptx",
        metavar="DIRECTORY",
        help="what portable_kernels.py --write-ptx wrote; without it Volta's kernels are left out",
    )
    options = parser.parse_args()
    if reason := choice.unavailable_reason():
        raise UserError(f"nothing to measure: {reason}")
    result = measured_by(options) | {"rows": []}
    for capability, dtype, library in kernel_sets(options.ptx):
        within = forced(library, capability) if capability else contextlib.nullcontext()
        with within:
            for shape in SHAPES:
                result["rows"].append(row(capability, dtype, shape))
                print(cells(result["rows"][-1]), flush=True)
                save(result, table(result), options.output)


def kernel_sets(ptx: str | None) -> list[tuple[int, torch.dtype, object]]:
    """(compute capability that the kernels are for, or 0 for the GPU's own; type; library)."""
    ours = cuda.kernels(0)
    found = [(0, torch.bfloat16, ours), (80, torch.bfloat16, ours)]
    if ptx:
        import ptx_library

        volta = ptx_library.load(ours, Path(ptx) / "triangle", device=0)
        found.append((70, torch.float16, volta))
    return found


def row(capability: int, dtype: torch.dtype, shape: tuple[int, ...]) -> dict:
    """One shape: what a run's race finds in how long, and what longer timing finds."""
    batch, tokens, channels, heads, taps = shape
    device = torch.device("cuda", 0)
    case = choice.case_of(0, dtype, False, tokens, channels, heads, taps)
    began = time.perf_counter()
    raced, failures = race(Workload(device, case, batch, dtype, missing=None))
    seconds = time.perf_counter() - began
    chosen = min(raced, key=raced.get)
    tensors = inputs(case, batch, dtype, device)
    timed = long_times({name: step(tensors, name) for name in CANDIDATES if name in raced})
    return {
        "kernels": case.kernels,
        "forced": bool(capability),
        "case": case.describe(batch),
        "chosen": chosen,
        "seconds": seconds,
        "raced_ms": raced,
        "failures": failures,
        "timed_ms": timed,
        "behind": timed[chosen] / min(timed.values()),
    }


def long_times(calls: dict) -> dict[str, float]:
    """Median milliseconds of each call over many rounds, in turns."""
    counts = {
        name: max(1, int(LONG_ROUND_MS / milliseconds(call, 2))) for name, call in calls.items()
    }
    rounds = [
        {name: milliseconds(call, counts[name]) for name, call in calls.items()}
        for _ in range(LONG_ROUNDS)
    ]
    return {name: statistics.median(times[name] for times in rounds) for name in calls}


COLUMNS = ["kernels for", "case", "auto takes", "in s", "race: cuda", "panels", "dense"]
COLUMNS += ["longer: cuda", "panels", "dense", "behind"]


def cells(row: dict) -> str:
    def ms(times: dict) -> list[str]:
        return [f"{times[name]:.3f}" if name in times else "-" for name in CANDIDATES]

    kernels = f"{row['kernels'] / 10:.1f}" if row["kernels"] else "any GPU"
    texts = [kernels, row["case"], row["chosen"], f"{row['seconds']:.2f}"]
    texts += [*ms(row["raced_ms"]), *ms(row["timed_ms"]), f"{row['behind']:.2f}"]
    return f"| {' | '.join(texts)} |"


def table(result: dict) -> str:
    lines = [
        "# What auto chooses before a run's first step",
        "",
        "Milliseconds of a forward and backward. Kernels for 7.0 and 8.0 run in place of the "
        "GPU's own; 7.0's are emulated by newer GPUs.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|---|" + "---:|" * 8,
        *map(cells, result["rows"]),
    ]
    lines.append(f"\nMeasured on {origin(result)}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_command(main)
