"""Random cases of `mixer::keyed_conv` against fp64, and what an operator owes PyTorch.

As a program it checks both in Triton's interpreter, on the CPU, with TRITON_INTERPRET=1. Beside
each input of a case lie NaNs, which must not be read, beside each output sevens, which must stay:

    python keyed_cases.py KERNELS.py SEED CASES
"""

import functools
import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

import mixer.ops
from mixer.ops import keyed, keyed_conv, plain

APART = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative, of norms
GUARD = 4096  # numbers on each side
RESULTS = ("y", "gradient of query, key and value", "gradient of mixing", "gradient of bias")
# The weight in full, by lag, and by lag with a falling part, over infinitely many tokens and fewer.
FORMS = ("full", "lags", "falling")
DECAYS = (0.0, 1 / 256, 1 / 64, 0.3, 2.0, 40.0)


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    key: int
    value: int
    tokens: int
    context: int
    dtype: torch.dtype
    wide_weight: bool  # in float32
    form: str  # of FORMS
    offset: int = 0  # of a token's channels, in numbers: with 1 none begins at 16 bytes


def drawn(
    rng: random.Random, sizes: list[int], contexts: list[int], dtypes: list[torch.dtype]
) -> Case:
    context = rng.choice(contexts)
    return Case(
        batch=rng.choice([1, 2, 3]),
        heads=rng.choice([1, 2, 3]),
        key=rng.choice(sizes),
        value=rng.choice(sizes),
        tokens=rng.choice([context, max(1, context - 3), max(1, context // 2)]),
        context=context,
        dtype=rng.choice(dtypes),
        wide_weight=rng.random() < 0.5,
        form=rng.choice(FORMS),
        offset=rng.choice([0, 0, 1, 8]),
    )


def guarded(x: Tensor, fill: float) -> Tensor:
    """A copy of x between GUARD numbers."""
    buffer = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype, device=x.device)
    return buffer[GUARD:-GUARD].view(x.shape).copy_(x)


def check(case: Case, device: str) -> None:
    """Raises AssertionError if a result is away from fp64's by more than rounding."""
    torch.manual_seed(case.context)
    keys = case.heads * case.key  # channels of the keys of all heads
    values = case.heads * case.value
    # As from one projection, of a longer text whose end is not given.
    shape = (case.batch, case.tokens + 2, case.offset + 2 * keys + values)
    projected = torch.randn(shape, device=device).to(case.dtype)
    projected[:, case.tokens :] = torch.nan
    projected = guarded(projected, torch.nan)[:, : case.tokens, case.offset :].requires_grad_()
    weight_dtype = torch.float32 if case.wide_weight else case.dtype
    # The weight's rounding to the type is of both sides.
    lags = case.form != "full"
    shape = (case.context,) if lags else (case.context, case.context)
    mixing = torch.randn(case.heads, 1, *shape, device=device).to(case.dtype)
    mixing = guarded(mixing.to(weight_dtype), torch.nan).requires_grad_()
    bias = torch.randn(case.heads, case.context, device=device).to(weight_dtype)
    bias = guarded(bias, torch.nan).requires_grad_()
    falls = [DECAYS[(case.context + head) % len(DECAYS)] for head in range(case.heads)]
    decay = torch.tensor(falls, device=device) if case.form == "falling" else None
    dy = torch.randn(case.batch, case.tokens, values, device=device).to(case.dtype)
    dy = guarded(dy, torch.nan)

    def results(dtype: torch.dtype, conv) -> list[Tensor]:
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (projected, mixing, bias)]
        if dtype != torch.float64:
            leaves = [projected, mixing, bias]
        y = conv(*leaves[0].split([keys, keys, values], dim=-1), *leaves[1:])
        return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

    def exactly(query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, bias: Tensor):
        if not lags:
            return plain.keyed_conv(query, key, value, mixing, bias)
        exact_decay = None if decay is None else decay.double()
        return plain.keyed_conv(query, key, value, None, bias, lags=mixing, decay=exact_decay)

    by_kernels = functools.partial(keyed.by_kernels, decay=decay)
    ours = again = results(case.dtype, by_kernels)
    if device != "cpu":  # where the interpreter runs one program after another
        again = results(case.dtype, by_kernels)
    exact = results(torch.float64, exactly)
    for name, result, repeated, expected in zip(RESULTS, ours, again, exact, strict=True):
        assert result.shape == expected.shape, f"{case}: {name} has shape {tuple(result.shape)}"
        assert torch.equal(result, repeated), f"{case}: {name} has other bits the second time"
        error = (result.double() - expected).norm() / expected.norm()
        assert error <= APART[case.dtype], f"{case}: {name} is {error:.1e} away from fp64"
    unread = ours[2][..., case.tokens :] if lags else ours[2].triu(1)
    assert not unread.any(), f"{case}: what is not read has a gradient"


# ------------------------------------------------------------------------- in the interpreter


def load(file: str) -> ModuleType:
    """The kernels of a file in place of the package's."""
    spec = importlib.util.spec_from_file_location("mixer.ops.keyed_kernels", file)
    kernels = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mixer.ops.keyed_kernels = kernels
    spec.loader.exec_module(kernels)
    return kernels


def random_cases(kernels: ModuleType, seed: int, cases: int) -> None:
    outputs = watch(kernels)
    rng = random.Random(seed)
    for number in range(cases):
        sizes = [16, 32, 64]
        for tiles in (kernels.TILES, kernels.FLOAT32_TILES):
            for name in tiles:
                tiles[name] = (rng.choice(sizes), rng.choice(sizes), 4, 1, None)
            edges = sorted(tiles["grad_lags"][:2], reverse=True)  # no more columns than rows
            tiles["grad_lags"] = (*edges, 4, 1, None)
        dtypes = [torch.float32, torch.float16]  # the interpreter multiplies bf16 as integers
        kernels.ENOUGH_PROGRAMS = rng.choice([1, 4, 256])
        case = drawn(rng, [16, 32], [1, 8, 40, 64, 100, 130], dtypes)
        case = replace(case, batch=min(case.batch, 2), heads=min(case.heads, 2))  # it is slow
        outputs.clear()
        check(case, "cpu")
        for output in outputs:
            assert torch.all(output[:GUARD] == 7) and torch.all(output[-GUARD:] == 7), (
                f"{case}: written outside of an output"
            )
        print(f"{number}: {case}", flush=True)


def watch(kernels: ModuleType) -> list[Tensor]:
    """Has the kernels' weights between NaN, and their outputs between sevens: the list of those."""
    outputs: list[Tensor] = []
    weights_of = keyed.weights_of

    def empty(like: Tensor, shape: tuple, dtype: torch.dtype | None = None) -> Tensor:
        output = guarded(torch.full(shape, torch.nan, dtype=dtype or like.dtype), 7.0)
        outputs.append(output._base)
        return output

    kernels.empty = empty
    keyed.weights_of = lambda *inputs: [
        None if weight is None else guarded(weight, torch.nan) for weight in weights_of(*inputs)
    ]
    return outputs


def operator() -> None:
    """What autograd, torch.compile and autocast see is the operators' own."""
    keyed.uses_kernels = torch.compiler.assume_constant_result(lambda *_: True)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 24, 32)
    leaves = [query, key, value, torch.randn(2, 1, 32, 32), torch.randn(2, 32)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    packed = keyed.weights_of(leaves[3], None, 24, torch.float32)
    torch.library.opcheck(torch.ops.mixer.keyed_conv.default, [*leaves, *packed])
    owes(leaves, "grad_weight", keyed_conv, plain.keyed_conv)
    decay = torch.tensor([0.0, 0.1])
    leaves[3] = torch.randn(2, 1, 32).requires_grad_()
    strips = keyed.weights_of(leaves[3], decay, 24, torch.float32)
    torch.library.opcheck(torch.ops.mixer.keyed_conv.default, [*leaves, *strips])

    def by_lag(query, key, value, lags, bias, backend="dense"):
        return keyed_conv(query, key, value, bias=bias, lags=lags, decay=decay, backend=backend)

    owes(leaves, "grad_lags", by_lag, by_lag)


def owes(leaves: list[Tensor], of_mixing: str, by_kernels: Callable, exactly: Callable) -> None:
    """Checks one of the operators: the fourth leaf is its weight or its lags."""

    def results(y: Tensor) -> list[Tensor]:
        return [y, *torch.autograd.grad(y.sin().sum(), leaves)]

    expected = results(exactly(*leaves))
    compiled = torch.compile(by_kernels, fullgraph=True, backend="aot_eager")
    for conv in (by_kernels, compiled):
        ours = results(conv(*leaves, backend="cuda"))
        for result, exact in zip(ours, expected, strict=True):
            assert (result - exact).norm() <= 1e-5 * exact.norm()
    calls = 0
    real = getattr(mixer.ops.keyed_kernels, of_mixing)

    def count(*inputs):
        nonlocal calls
        calls += 1
        return real(*inputs)

    setattr(mixer.ops.keyed_kernels, of_mixing, count)
    frozen = [*leaves[:3], *(leaf.detach() for leaf in leaves[3:])]
    torch.autograd.grad(by_kernels(*frozen, backend="cuda").sum(), leaves[:3])
    assert calls == 0, "a frozen weight's gradient is computed"
    try:
        total = by_kernels(*leaves, backend="cuda").sum()
        torch.autograd.grad(total, leaves[0], create_graph=True)
        raise AssertionError("a second derivative can be asked for, which nothing computes")
    except NotImplementedError as error:
        assert "backend 'dense'" in str(error), error
    with torch.autocast("cpu", torch.float16):
        y = by_kernels(*leaves, backend="cuda")
    assert y.dtype == torch.float16
    assert (y.float() - expected[0]).norm() / expected[0].norm() < APART[torch.float16]


if __name__ == "__main__":
    file, *numbers = sys.argv[1:]
    weights_of = keyed.weights_of
    random_cases(load(file), *map(int, numbers))
    keyed.weights_of = weights_of
    load(file)
    operator()
