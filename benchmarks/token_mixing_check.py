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
from mixer.models.masked_mixer import plain
from mixer.models.masked_mixer.plain import split_heads

MAX_ERROR = 5e-3  # relative RMSE; rounding a result to bf16 alone gives 1.7e-3
GRADIENTS = ("grad_weight", "autograd")  # their first result is the weight's


class Expected:
    """fp64 results for slot 0, from the dense product and its autograd: another formula than any
    variant's.
    """

    def __init__(self, data: Data):
        self.slot, self.heads = data.slots[0], data.shape.heads

    def __call__(self, operation: str, by_lag: bool = False) -> tuple[Tensor, ...]:
        if operation == "pack":
            return (self.slot.masked,)
        y, dx, dweight = self.results(by_lag)
        bias = self.slot.bias.double()[..., None]  # (heads, tokens, 1)
        if operation == "fused":
            bias = self.slot.narrow_bias.double()[..., None]
            return (self.with_bias(y, bias) + self.slot.residual.double(),)
        dbias = split_heads(self.slot.dy, self.heads).sum((1, 3), dtype=torch.float64)
        return {
            "forward": (y,),
            "grad_input": (dx,),
            "grad_weight": (dweight,),
            "autograd": (dweight, dx, dbias, self.with_bias(y, bias)),
        }[operation]

    def results(self, by_lag: bool) -> list[Tensor]:
        """y without bias, and the gradients of x and of the weight, or of the lags.

        Sample by sample: a batch would hold a gradient of the weight for each of its samples.
        """
        slot, ys, dxs = self.slot, [], []
        given = slot.lags.to(slot.x.dtype) if by_lag else slot.masked
        weight = given.double().requires_grad_()
        full, lags = (None, weight[:, None]) if by_lag else (weight[:, None], None)
        for x, dy in zip(slot.x.double().split(1), slot.dy.double().split(1), strict=True):
            y = plain.dense(x.requires_grad_(), full, None, None, lags)
            y.backward(dy)  # adds to the weight's gradient
            ys.append(y.detach())
            dxs.append(x.grad)
        return [torch.cat(ys), torch.cat(dxs), weight.grad]

    def with_bias(self, y: Tensor, bias: Tensor) -> Tensor:
        return plain.merge_heads(split_heads(y, self.heads) + bias[:, None])


def check(variant: Variant, operation: str, wanted: tuple[Tensor, ...], data: Data) -> dict:
    """{"error": largest relative RMSE, "failure": why it must not be timed, or None}."""
    try:
        with contextlib.nullcontext() if variant.compiled else poisoned(data.slots[0]):
            results = variant.standard(variant.call(0))
        results = results if isinstance(results, tuple) else (results,)
        errors = [rmse(*pair) for pair in zip(results, wanted, strict=True)]
    except Exception as error:  # whatever it is, the other variants go on without this one
        return {"error": None, "failure": first_line(error)}
    error = max(errors, key=lambda value: math.inf if math.isnan(value) else value)
    if not error < MAX_ERROR:
        return {"error": str(error), "failure": f"wrong: relative RMSE {error:.2g} against fp64"}
    leaks = operation in GRADIENTS and variant.family != "by lag" and results[0].triu(1).any()
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
