"""Whether a variant computes the right thing, before it is timed: against fp64, with every output
poisoned first.
"""

import contextlib
import math
import warnings

import torch
from token_mixing_variants import Data, Variant
from torch import Tensor

from mixer.common.errors import first_line
from mixer.ops import plain
from mixer.ops.plain import shift_channels, split_heads, tap_shift

MAX_ERROR = 5e-3  # relative RMSE; rounding a result to bf16 alone gives 1.7e-3
MAX_ROWS = 64


class Expected:
    """fp64 results for slot 0: whole samples of y and dx (the first and the last), whole rows of
    dW, all of dbias.
    """

    def __init__(self, data: Data):
        slot = data.slots[0]
        self.slot = slot
        self.heads, self.taps, self.tokens, _ = slot.masked.shape
        self.samples = sorted({0, data.shape.batch - 1})
        count = min(MAX_ROWS, self.tokens)
        self.rows = [index * (self.tokens - 1) // max(1, count - 1) for index in range(count)]
        columns = torch.arange(self.tokens, device=data.device)
        # (rows, tokens): which columns are above the diagonal, in these rows
        self.above = columns > torch.tensor(self.rows, device=data.device)[:, None]
        self.weight = slot.masked.double()

    def __call__(self, operation: str) -> tuple[Tensor, ...]:
        slot = self.slot
        if operation == "forward":
            return (self.forward(None, None),)
        if operation == "fused":
            return (self.forward(slot.narrow_bias.double(), slot.residual[self.samples].double()),)
        if operation == "grad_input":
            return (self.grad_input(),)
        if operation == "grad_weight":
            return (self.grad_weight(),)
        if operation == "grad_weight_bias":
            return self.grad_weight(), self.grad_bias()
        if operation == "pack":
            return (slot.masked,)
        return (
            self.grad_weight(),
            self.grad_input(),
            self.grad_bias(),
            self.forward(slot.bias.double(), None),
        )

    def forward(self, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return plain.triangular_conv(
            self.slot.x[self.samples].double(), self.weight, bias, residual
        )

    def grad_input(self) -> Tensor:
        """Through autograd of the dense product: another formula than any backend's."""
        x = torch.zeros_like(self.slot.x[self.samples], dtype=torch.float64).requires_grad_()
        y = plain.triangular_conv(x, self.weight, None, None)
        return torch.autograd.grad(y, x, self.slot.dy[self.samples].double())[0]

    def grad_weight(self) -> Tensor:
        dy = split_heads(self.slot.dy[:, self.rows].double(), self.heads)
        x = split_heads(self.slot.x.double(), self.heads)
        taps = [
            torch.einsum(
                "hbrc,hbtc->hrt", dy, shift_channels(x, tap_shift(tap, self.taps))
            ).masked_fill(self.above, 0)
            for tap in range(self.taps)
        ]
        return torch.stack(taps, 1)

    def grad_bias(self) -> Tensor:
        return split_heads(self.slot.dy, self.heads).sum((1, 3), dtype=torch.float64)

    def select(self, operation: str, results: tuple[Tensor, ...]) -> list[Tensor]:
        """The parts of a variant's results that stand beside the expected ones."""
        if operation in ("forward", "fused", "grad_input"):
            return [results[0][self.samples]]
        if operation == "pack":
            return list(results)
        first = results[0][:, :, self.rows].masked_fill(self.above, 0)
        if operation == "autograd":
            return [first, results[1][self.samples], results[2], results[3][self.samples]]
        return [first, *results[1:]]

    def leaks(self, operation: str, results: tuple[Tensor, ...]) -> bool:
        """Whether a weight gradient is anything but zero above the diagonal."""
        if operation not in ("grad_weight", "grad_weight_bias", "autograd"):
            return False
        return bool((results[0][:, :, self.rows] != 0).logical_and(self.above).any())


def check(variant: Variant, operation: str, expected: Expected, wanted: tuple[Tensor, ...]) -> dict:
    """{"error": largest relative RMSE, "failure": why it must not be timed, or None}."""
    try:
        with contextlib.nullcontext() if variant.compiled else poisoned(expected.slot):
            results = variant.standard(variant.call(0))
        results = results if isinstance(results, tuple) else (results,)
        errors = [
            rmse(*pair) for pair in zip(expected.select(operation, results), wanted, strict=True)
        ]
        # Ours promises exact zeros there; of the alternatives nobody asks it.
        leaks = variant.family in ("ours", "auto") and expected.leaks(operation, results)
    except Exception as error:  # whatever it is, the other variants go on without this one
        return {"error": None, "failure": first_line(error)}
    error = max(errors, key=lambda value: math.inf if math.isnan(value) else value)
    if not error < MAX_ERROR:
        return {"error": str(error), "failure": f"wrong: relative RMSE {error:.2g} against fp64"}
    return {"error": error, "failure": "wrong: not zero above the diagonal" if leaks else None}


def rmse(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        raise ValueError(f"shape {tuple(found.shape)} where {tuple(wanted.shape)} was expected")
    return ((found.double() - wanted).norm() / wanted.double().norm()).item()


@contextlib.contextmanager
def poisoned(slot):
    """Outputs start as NaN: what is not written shows. (Not for compiled calls: the switch would
    compile them anew.)
    """
    slot.y.fill_(math.nan)
    slot.dweight.fill_(math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that have no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
