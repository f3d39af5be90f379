"""The kernel ladder: checks every version of the forward product against fp64, times it, makes a
table.

    python benchmarks/kernel_ladder.py --output PATH [--versions 3,7] [--tokens 512,1024] \\
        [--batch-tokens 65536] [--channels 1024]

Compiles dev/cuda first. Writes PATH.json with every configuration and PATH.md with the
fastest one of each version. Version 0 is cuBLAS, through PyTorch; 7 is the trainer's own kernel. A
configuration that fails its check is not timed, and then the exit status is 1.
"""

import argparse
import ctypes
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timing
import torch
import torch.nn.functional as F
from saving import markdown, measured_by, numbers, origin, parser_of, save
from torch import Tensor

from mixer.common.errors import UserError, first_line, run_command
from mixer.ops import cuda, selftest
from mixer.ops.build import find_nvcc

SOURCE = Path(__file__).resolve().parents[1] / "dev" / "cuda" / "forward.cu"
FLAGS = ["-O3", "-std=c++17", "-lineinfo", "-shared", "-Xcompiler", "-fPIC"]
VERSIONS = {
    0: "cuBLAS, the dense product",
    1: "one thread an element, no product above the diagonal",
    2: "tiles in shared memory, none above the diagonal",
    3: "8x8 elements a thread in registers, 16-byte loads",
    4: "tensor cores: mma.sync and ldmatrix",
    5: "cp.async pipeline, XOR swizzle",
    6: "TMA, mbarriers, wgmma, a producer warp",
    7: "the trainer's own kernel: persistent blocks, tiles dealt out evenly, multicast",
}
SMALL = [(3, 200, 136), (2, 331, 264)]  # (batch, tokens, channels) that fill no tile
MAX_ERROR = 0.01  # of an element, relative to its size and the mean element's
ROUNDS = 9
BATCH_MS = 4.0


def main() -> None:
    options = arguments()
    if not torch.cuda.is_available():
        raise UserError("torch sees no NVIDIA GPU, which the ladder needs")
    result = measured_by(options) | {"rows": []}
    library = compiled()
    for tokens in options.tokens:
        shape = max(1, options.batch_tokens // tokens), tokens, options.channels
        result["rows"] += climb(library, shape, options.versions)
        save(result, table(result), options.output)
    print(table(result))
    sys.exit(any(row["failure"] for row in result["rows"] if "error" in row))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    versions = "some of 0 to 7"
    parser.add_argument("--versions", type=numbers, default=[*VERSIONS], help=versions)
    parser.add_argument("--tokens", type=numbers, default=[512, 1024, 2048, 4096])
    parser.add_argument("--batch-tokens", type=int, default=65536, help="batch x tokens")
    parser.add_argument("--channels", type=int, default=1024, help="a multiple of 8")
    options = parser.parse_args()
    if unknown := [version for version in options.versions if version not in VERSIONS]:
        raise UserError(f"--versions has {unknown}; allowed: 0 to 7")
    if options.channels < 8 or options.channels % 8:
        raise UserError(f"--channels is {options.channels}; it must be a multiple of 8")
    return options


# ------------------------------------------------------------------------- the kernels


class Arguments(ctypes.Structure):
    """Arguments of forward.cu, field by field; what its launches set stays zero."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("batch", ctypes.c_int),
        ("tokens", ctypes.c_int),
        ("channels", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("group", ctypes.c_int),
    ]


@dataclass
class Configuration:
    version: int
    name: str
    call: Callable  # with a Problem: its y


def compiled() -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}" + "a" * (major == 9)
    target = SOURCE.with_name("build") / f"forward-{architecture}.so"
    target.parent.mkdir(exist_ok=True)
    flags = [*FLAGS, f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    command = [str(find_nvcc()), *flags, str(SOURCE), "-o", str(target)]
    compilation = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if compilation.returncode != 0:
        raise UserError(f"`{' '.join(command)}` failed:\n{compilation.stderr}")
    library = ctypes.CDLL(str(target))
    library.configuration_name.restype = ctypes.c_char_p
    library.launch_configuration.argtypes = [ctypes.c_int, ctypes.POINTER(Arguments)]
    return library


def configurations(library: ctypes.CDLL) -> list[Configuration]:
    ladder = [Configuration(0, "batched product", dense)]
    for index in range(library.configuration_count()):
        name = library.configuration_name(index).decode()
        version = library.configuration_version(index)
        ladder.append(Configuration(version, name, launcher(library, index)))
    ladder.append(Configuration(7, "as the trainer calls it", trainers))
    return ladder


def launcher(library: ctypes.CDLL, index: int) -> Callable:
    def call(problem: "Problem") -> Tensor:
        status = library.launch_configuration(index, problem.arguments)
        if status != 0:
            raise RuntimeError(f"CUDA error {status}")
        return problem.y

    return call


def dense(problem: "Problem") -> Tensor:
    return torch.bmm(problem.square.expand(len(problem.x), -1, -1), problem.x, out=problem.y)


def trainers(problem: "Problem") -> Tensor:
    return cuda.forward(problem.x, problem.weight[None], None, None)


def unavailable(version: int) -> str | None:
    """Why a version cannot run on this GPU; None if it can."""
    if version == 6 and torch.cuda.get_device_capability() != (9, 0):
        return "needs compute capability 9.0"
    return selftest.fault(0) if version == 7 else None


# ------------------------------------------------------------------------- check and timing


class Problem:
    def __init__(self, batch: int, tokens: int, channels: int, device: str = "cuda"):
        weight = torch.randn(tokens, tokens, device=device, dtype=torch.bfloat16) * tokens**-0.5
        columns = cuda.packed_shape(1, tokens, window=0)[2]
        self.weight = F.pad(weight.tril(), (0, columns - tokens))
        self.square = self.weight[:, :tokens]
        self.x = torch.randn(batch, tokens, channels, device=device, dtype=torch.bfloat16)
        self.y = torch.empty_like(self.x)
        pointers = (tensor.data_ptr() for tensor in (self.weight, self.x, self.y))
        self.arguments = Arguments(*pointers, batch, tokens, channels, columns)

    def exact(self) -> Tensor:
        """y in fp64."""
        return self.square.double() @ self.x.double()


def climb(library: ctypes.CDLL, shape: tuple[int, int, int], versions: list[int]) -> list[dict]:
    """A row for each configuration: its error and its milliseconds, or why it has none.

    shape: (batch, tokens, channels).
    """
    timed = Problem(*shape)
    problems = [Problem(*small) for small in SMALL] + [timed]
    exact = [problem.exact() for problem in problems]
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(2, 3 * cache_bytes // (2 * timed.x.nbytes) + 1)
    slots = [timed, *(Problem(*shape) for _ in range(count - 1))]
    rows = []
    calls = {}
    batch, tokens, channels = shape
    for configuration in configurations(library):
        version = configuration.version
        name = configuration.name
        call = configuration.call
        if version not in (0, *versions):  # cuBLAS is what the others are compared with
            continue
        row = {"batch": batch, "tokens": tokens, "channels": channels}
        row |= {"version": version, "configuration": name, "failure": unavailable(version)}
        if row["failure"] is None:
            row |= check(call, problems, exact)
        if row["failure"] is None:
            calls[version, name] = lambda slot, call=call: call(slots[slot])
        rows.append(row)
        print(row, flush=True)
    times = timing.interleaved(calls, "cuda", count, ROUNDS, BATCH_MS)
    return [row | times.get((row["version"], row["configuration"]), {}) for row in rows]


def check(call: Callable, problems: list[Problem], exact: list[Tensor]) -> dict:
    """{"error": the largest of an element, "failure": what is wrong, or None}."""
    errors = []
    try:
        for problem, expected in zip(problems, exact, strict=True):
            problem.y.fill_(torch.nan)
            sizes = expected.abs() + expected.square().mean().sqrt()
            differences = (call(problem).double() - expected).abs() / sizes
            errors.append(differences.max().item())  # NaN if one is
    except RuntimeError as error:
        return {"error": None, "failure": first_line(error)}
    if all(error <= MAX_ERROR for error in errors):
        return {"error": max(errors), "failure": None}
    off_by = " and ".join(f"{error:.2g}" for error in errors)
    return {"error": None, "failure": f"elements are off by {off_by}; allowed: {MAX_ERROR}"}


# ------------------------------------------------------------------------- the table


def table(result: dict) -> str:
    """The fastest configuration of each version, as Markdown."""
    caption = f"Useful TFLOP/s count the lower triangle alone. {origin(result)}"
    paragraphs = ["# The ladder", caption]
    head = ["version", "what it adds", "best configuration"]
    head += ["ms", "useful TFLOP/s", "% of cuBLAS"]
    groups: dict[tuple, dict[int, dict]] = {}
    for row in sorted(result["rows"], key=lambda row: row.get("ms", math.inf), reverse=True):
        key = row["tokens"], row["batch"], row["channels"]
        groups.setdefault(key, {})[row["version"]] = row  # the fastest comes last
    for (tokens, batch, channels), fastest in sorted(groups.items()):
        paragraphs.append(f"## {batch} x {tokens} tokens, {channels} channels")
        flops = batch * tokens * (tokens + 1) * channels
        cublas_ms = fastest.get(0, {}).get("ms")
        rows = [cells(row, flops, cublas_ms) for _, row in sorted(fastest.items())]
        paragraphs.append(markdown(head, rows))
    return "\n\n".join(paragraphs) + "\n"


def cells(row: dict, flops: int, cublas_ms: float | None) -> list[str]:
    version = row["version"]
    start = [str(version) if version else "cuBLAS", VERSIONS[version]]
    if "ms" not in row:
        return [*start, f"failed: {row['failure']}", "-", "-", "-"]
    percent = f"{100 * cublas_ms / row['ms']:.1f}" if cublas_ms else "-"
    speed = [f"{row['ms']:.4f}", f"{flops / row['ms'] / 1e9:.1f}"]
    return [*start, row["configuration"], *speed, percent]


if __name__ == "__main__":
    run_command(main)
