"""The kernel ladder: checks every version of every product against fp64, times it, makes a table.

    python benchmarks/kernel_ladder.py --output PATH [--operations forward,...] [--versions 3,7] \\
        [--tokens 512,1024] [--batch-tokens 65536] [--channels 1024]

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
from saving import markdown, measured_by, names, numbers, origin, parser_of, save
from torch import Tensor

from mixer.common.errors import UserError, first_line, run_command
from mixer.ops import choice, cuda

KERNELS = Path(__file__).resolve().parents[1] / "dev" / "cuda"
OPERATIONS = {
    "forward": "Forward: y = W x",
    "grad_input": "Input gradient: dx = Wᵀ dy",
    "grad_weight": "Weight gradient: dW = tril(Σ dy xᵀ)",
}
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
ROUNDS, BATCH_MS = 9, 4.0


def main() -> None:
    options = arguments()
    if not torch.cuda.is_available():
        raise UserError("torch sees no NVIDIA GPU, which the ladder needs")
    result = measured_by(options) | {"rows": []}
    for operation in options.operations:
        library = compiled(operation)
        for tokens in options.tokens:
            size = max(1, options.batch_tokens // tokens), tokens, options.channels
            result["rows"] += climb(operation, library, size, options.versions)
            save(result, table(result), options.output)
    print(table(result))
    sys.exit(any(row["failure"] for row in result["rows"] if "error" in row))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--operations", type=names, default=[*OPERATIONS])
    add("--versions", type=numbers, default=[*VERSIONS], help="some of 0 to 7")
    add("--tokens", type=numbers, default=[512, 1024, 2048, 4096])
    add("--batch-tokens", type=int, default=65536, help="batch x tokens")
    add("--channels", type=int, default=1024, help="a multiple of 8")
    options = parser.parse_args()
    for name, allowed in (("operations", OPERATIONS), ("versions", VERSIONS)):
        if unknown := [one for one in getattr(options, name) if one not in allowed]:
            raise UserError(f"--{name} has {unknown}; allowed: {', '.join(map(str, allowed))}")
    if options.channels < 8 or options.channels % 8:
        raise UserError(f"--channels is {options.channels}; it must be a multiple of 8")
    return options


# ------------------------------------------------------------------------- the kernels


class Arguments(ctypes.Structure):
    """Arguments of versions.cuh, field by field; what its launches set stays zero."""

    POINTERS = ("weight", "x", "dy", "bias", "residual", "output")
    _fields_ = (
        [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int) for name in ("batch", "tokens", "channels", "columns", "group")]
        + [("workspace", ctypes.c_void_p)]
    )


@dataclass
class Configuration:
    version: int
    name: str
    call: Callable  # with a Problem: its output


def compiled(operation: str) -> ctypes.CDLL:
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}" + "a" * (major == 9)
    target = f"build/{architecture}/{operation}.so"
    command = ["make", "-s", "-C", str(KERNELS), f"ARCH={architecture}", target]
    if (done := subprocess.run(command, stderr=subprocess.PIPE, text=True)).returncode != 0:
        raise UserError(f"`{' '.join(command)}` failed:\n{done.stderr}")
    library = ctypes.CDLL(str(KERNELS / target))
    library.configuration_name.restype = ctypes.c_char_p
    library.launch_configuration.argtypes = [ctypes.c_int, ctypes.POINTER(Arguments)]
    return library


def configurations(operation: str, library: ctypes.CDLL) -> list[Configuration]:
    found = [Configuration(0, "batched product", RIVALS[operation])]
    for index in range(library.configuration_count()):
        name = library.configuration_name(index).decode()
        version = library.configuration_version(index)
        found.append(Configuration(version, name, launcher(library, index)))
    return [*found, Configuration(7, "as the trainer calls it", TRAINERS[operation])]


def launcher(library: ctypes.CDLL, index: int) -> Callable:
    def call(problem: "Problem") -> Tensor:
        if status := library.launch_configuration(index, problem.arguments):
            raise RuntimeError(f"CUDA error {status}")
        return problem.output

    return call


def unavailable(version: int) -> str | None:
    """Why a version cannot run on this GPU; None if it can."""
    if version == 6 and torch.cuda.get_device_capability() != (9, 0):
        return "needs compute capability 9.0"
    return choice.device_reason(0) if version == 7 else None


# ------------------------------------------------------------------------- problems


class Problem:
    """Tensors of one problem; with bias and residual if `fused`, which the forward alone takes."""

    def __init__(
        self,
        operation: str,
        batch: int,
        tokens: int,
        channels: int,
        fused: bool = False,
        device: str = "cuda",
    ):
        def normal(*size: int, dtype=torch.bfloat16) -> Tensor:
            return torch.randn(size, device=device, dtype=dtype)

        self.operation = operation
        size, columns = (batch, tokens, channels), cuda.packed_shape(1, tokens, False)[2]
        fused = fused and operation == "forward"
        square = (normal(tokens, tokens) * tokens**-0.5).tril()
        self.weight = F.pad(square, (0, columns - tokens))
        self.x, self.dy = normal(*size), normal(*size)
        self.bias = normal(tokens, dtype=torch.float32) if fused else None
        self.residual = normal(*size) if fused else None
        self.output = torch.empty_like(self.x)
        if operation == "grad_weight":
            self.output = torch.empty(tokens, tokens, device=device)
        pointers = {name: getattr(self, name) for name in Arguments.POINTERS}
        places = {name: one.data_ptr() for name, one in pointers.items() if one is not None}
        sizes = {"batch": batch, "tokens": tokens, "channels": channels, "columns": columns}
        self.arguments = Arguments(**places, **sizes)

    @property
    def square(self) -> Tensor:
        return self.weight[:, : self.x.shape[1]]

    def exact(self) -> Tensor:
        """The output in fp64."""
        x, dy, square = self.x.double(), self.dy.double(), self.square.double()
        if self.operation == "grad_weight":
            return sum(left @ right.T for left, right in zip(dy, x, strict=True)).tril()
        if self.operation == "grad_input":
            return square.T @ dy
        y = square @ x
        return y if self.bias is None else y + self.bias.double()[:, None] + self.residual.double()


def product(problem: Problem, square: Tensor, inputs: Tensor) -> Tensor:
    return torch.bmm(square.expand(len(inputs), -1, -1), inputs, out=problem.output)


def batched(problem: Problem) -> Tensor:
    """A product of each sample, then their sum."""
    return torch.bmm(problem.dy, problem.x.mT).sum(0, dtype=torch.float32)


def trainers_forward(problem: Problem) -> Tensor:
    bias = None if problem.bias is None else problem.bias[None]
    return cuda.forward(problem.x, problem.weight[None], bias, problem.residual)


def trainers_grad_weight(problem: Problem) -> Tensor:
    sizes = problem.x.shape[1], 1, torch.float32
    return cuda.grad_weight(problem.dy, problem.x, *sizes, with_bias=False)[0][0]


RIVALS = {
    "forward": lambda problem: product(problem, problem.square, problem.x),
    "grad_input": lambda problem: product(problem, problem.square.T, problem.dy),
    "grad_weight": batched,
}
TRAINERS = {
    "forward": trainers_forward,
    "grad_input": lambda problem: cuda.grad_input(problem.dy, problem.weight[None]),
    "grad_weight": trainers_grad_weight,
}


# ------------------------------------------------------------------------- check and timing


def climb(operation: str, library: ctypes.CDLL, size: tuple, versions: list[int]) -> list[dict]:
    """A row for each configuration: its error and its milliseconds, or why it has none."""
    timed = Problem(operation, *size)
    problems = [Problem(operation, *small, fused=True) for small in SMALL] + [timed]
    truths = [problem.exact() for problem in problems]
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(2, 3 * cache // (2 * timed.x.nbytes) + 1)
    slots = [timed, *(Problem(operation, *size) for _ in range(count - 1))]
    rows, calls = [], {}
    for one in configurations(operation, library):
        if one.version not in (0, *versions):  # cuBLAS is what the others are compared with
            continue
        batch, tokens, channels = size
        row = {"operation": operation, "batch": batch, "tokens": tokens, "channels": channels}
        row |= {"version": one.version, "configuration": one.name}
        row["failure"] = unavailable(one.version)
        if row["failure"] is None:
            which = slice(2 if one.version == 0 else 0, 3)  # cuBLAS adds no bias and no residual
            row |= check(one, problems[which], truths[which])
        if row["failure"] is None:
            calls[one.version, one.name] = lambda slot, one=one: one.call(slots[slot])
        rows.append(row)
        print(row, flush=True)
    times = timing.interleaved(calls, "cuda", count, ROUNDS, BATCH_MS)
    return [row | times.get((row["version"], row["configuration"]), {}) for row in rows]


def check(one: Configuration, problems: list[Problem], truths: list[Tensor]) -> dict:
    """{"error": the largest of an element, "failure": what is wrong, or None}."""
    errors = []
    try:
        for problem, exact in zip(problems, truths, strict=True):
            problem.output.fill_(torch.nan)
            found = one.call(problem).double()
            if problem.operation == "grad_weight":
                if one.version and found.triu(1).any():  # NaN is no zero either
                    return {"error": None, "failure": "not zero above the diagonal"}
                found = found.tril()
            sizes = exact.abs() + exact.square().mean().sqrt()
            errors.append(((found - exact).abs() / sizes).max().item())  # NaN if one is
    except RuntimeError as error:
        return {"error": None, "failure": first_line(error)}
    if all(error <= MAX_ERROR for error in errors):
        return {"error": max(errors), "failure": None}
    said = " and ".join(f"{error:.2g}" for error in errors)
    return {"error": None, "failure": f"elements are off by {said}; allowed: {MAX_ERROR}"}


# ------------------------------------------------------------------------- the table


def table(result: dict) -> str:
    """The fastest configuration of each version, as Markdown."""
    parts = ["# The ladder", f"Useful TFLOP/s count the lower triangle alone. {origin(result)}"]
    head = ["version", "what it adds", "best configuration", "ms", "useful TFLOP/s", "% of cuBLAS"]
    groups: dict[tuple, dict[int, dict]] = {}
    for row in sorted(result["rows"], key=lambda row: row.get("ms", math.inf), reverse=True):
        key = row["operation"], row["batch"], row["tokens"], row["channels"]
        groups.setdefault(key, {})[row["version"]] = row  # the fastest comes last
    order = [*OPERATIONS]
    for key, fastest in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0])):
        operation, batch, tokens, channels = key
        parts.append(f"## {OPERATIONS[operation]}, {batch} x {tokens} tokens, {channels} channels")
        flops, cublas = batch * tokens * (tokens + 1) * channels, fastest.get(0, {}).get("ms")
        rows = [cells(row, flops, cublas) for _, row in sorted(fastest.items())]
        parts.append(markdown(head, rows))
    return "\n\n".join(parts) + "\n"


def cells(row: dict, flops: int, cublas: float | None) -> list[str]:
    version = row["version"]
    start = [str(version) if version else "cuBLAS", VERSIONS[version]]
    if "ms" not in row:
        return [*start, f"failed: {row['failure']}", "-", "-", "-"]
    percent = f"{100 * cublas / row['ms']:.1f}" if cublas else "-"
    speed = [f"{row['ms']:.4f}", f"{flops / row['ms'] / 1e9:.1f}"]
    return [*start, row["configuration"], *speed, percent]


if __name__ == "__main__":
    run_command(main)
