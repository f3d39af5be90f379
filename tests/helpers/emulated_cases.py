"""Random cases of the CUDA kernels on a CPU, by a library of their emulated source:

    emulated_cases.py LIBRARY CAPABILITY SEED COUNT [OPERATION [LEAST_TOKENS [MOST_TOKENS]]]

It fails at the first result that differs from plain PyTorch's. The numbers are small integers, so
every sum is exact in any order. What a kernel does not write stays NaN.
"""

import ctypes
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import plain_kernels
import torch
from launching import run_python
from torch import Tensor

from mixer.ops import cuda

OPERATIONS = ["forward", "grad_input", "grad_weight"]
TOKENS = [1, 7, 63, 64, 65, 127, 128, 130, 192, 200, 256, 257, 300, 320, 384, 450, 512, 513, 577]
TOKENS += [640, 1000, 1100]  # near sizes where plans, tiles, blocks and boxes change
WINDOWS = [1, 2, 17, 63, 64, 65, 66, 100, 128, 129, 200, 256, 300]  # near sizes of tiles
WIDTHS = [8, 40, 64, 72, 128, 136, 256]
MOST_WORK = 4e6  # above that a case takes seconds


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def activations(batch: int, tokens: int, channels: int, dtype: torch.dtype) -> Tensor:
    """(batch, tokens, channels), side by side or with gaps, samples or tokens first."""
    layout = random.randrange(3)
    if layout == 0:
        return numbers(batch, tokens, channels, dtype=dtype)
    gap = torch.full((batch, tokens + 2, channels + 24), torch.nan, dtype=dtype)
    if layout == 2:
        gap = gap.transpose(0, 1).contiguous().transpose(0, 1)
    view = gap[:, 1:-1, 8:-16]
    return view.copy_(numbers(batch, tokens, channels, dtype=dtype))


def check(operation: str, tokens: int, dtypes: list[torch.dtype], processors: list[int]) -> None:
    heads = random.randint(1, 3)
    width = random.choice(WIDTHS)
    batch = random.choice([1, 2, 3, 5])
    if random.random() < 0.3:
        batch *= 4
    while batch * heads * width * max(tokens, 64) ** 2 / 64 > MOST_WORK:
        batch = max(1, batch // 2)
        heads = max(1, heads - 1)
        if batch == heads == 1:
            width = min(width, 72)
            break
    dtype = random.choice(dtypes)
    weight_dtype = random.choice([torch.float32, dtype])
    context = tokens + random.choice([0, 0, random.randrange(300)])
    window = random.choice([0, 0, context, random.choice(WINDOWS)])  # 0: a full weight
    facts["processors"] = random.choice(processors)
    print(operation, f"{tokens=} {heads=} {width=} {batch=} {dtype=}", end=" ")
    print(f"{window=} {weight_dtype=} {context=}")
    x = activations(batch, tokens, heads * width, dtype)
    dy = activations(batch, tokens, heads * width, dtype)
    if operation == "grad_weight":
        with_bias = facts["capability"] == 90 and not window and random.random() < 0.5
        results = cuda.grad_weight(dy, x, context, heads, with_bias, window)
        expected = plain_kernels.grad_weight(
            dy.double(), x.double(), context, heads, with_bias, window
        )
        compare(results, expected)
        return
    shape = [window] if window else [context, context]
    weight = numbers(heads, *shape, dtype=weight_dtype)
    packed = plain_kernels.pack(weight, tokens, dtype)
    if operation == "grad_input":
        dx = cuda.grad_input(dy, packed, window)
        compare([dx], [plain_kernels.grad_input(dy.double(), packed.double(), window)])
        return
    bias = random.choice([None, numbers(heads, context, dtype=weight_dtype)])
    residual = random.choice([None, activations(batch, tokens, heads * width, dtype)])
    y = cuda.forward(x, packed, bias, residual, window)
    expected = plain_kernels.forward(
        x.double(),
        packed.double(),
        None if bias is None else bias.double(),
        None if residual is None else residual.double(),
        window,
    )
    compare([y], [expected])


def compare(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, exact in zip(results, expected, strict=True):
        differs = (ours != exact.to(ours.dtype)).nonzero()
        assert len(differs) == 0, f"MISMATCH at {differs[:3].tolist()} of {len(differs)}"


facts = {"capability": 0, "processors": 0}


def emulate(path: str, capability: int) -> None:
    """Lets `mixer.ops.cuda` call the library with tensors of the CPU."""
    library = ctypes.CDLL(path)
    library.mixer_grad_weight_workspace.restype = ctypes.c_int64
    facts["capability"] = capability

    def call(name: str, params: cuda.Params) -> None:
        assert getattr(library, name)(ctypes.byref(params)) == 0, name

    cuda.call = call
    cuda.load_library = lambda index: library
    cuda.device_facts = lambda index: (capability, facts["processors"])


def main(path, capability, seed, count, operation="any", least=0, most=10000) -> None:
    random.seed(int(seed))
    torch.manual_seed(int(seed))
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    emulate(path, int(capability))
    tokens = [value for value in TOKENS if int(least) <= value <= int(most)]
    dtypes = [torch.float16] if int(capability) == 70 else [torch.float16, torch.bfloat16]
    for number in range(int(count)):
        checked = OPERATIONS[number % 3] if operation == "any" else operation
        # Every size in turn, and between them any.
        size = tokens[number % len(tokens)] if number % 2 else random.choice(tokens)
        check(checked, size, dtypes, processors=[2, 3, 4, 6])


def run_cases(library: Path, output: Path, *arguments, status: int = 0) -> None:
    """Runs this file: an emulator ends its process, with status 1, when it finds a fault."""
    run_python(__file__, library, *arguments, output=output, patience=300, status=status)


if __name__ == "__main__":
    main(*sys.argv[1:])
