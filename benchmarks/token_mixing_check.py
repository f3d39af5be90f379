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

MAX_ERROR = 5e-3  # relative RMSE; rounding a result to bf16 alone gives 1.7e-3
GRADIENTS = ("grad_weight", "autograd")  # their first result is the weight's


def exact(operation: str, data: Data, by_lag: bool = False) -> tuple[Tensor, ...]:
    """The results for slot 0, computed in fp64 by the dense product and its autograd: another
    formula than any variant's.

    Sample by sample: a batch would hold a gradient of the weight for each of its samples.
    """
    slot = data.slots[0]
    if operation == "pack":
        return (slot.masked,)
    mixing = slot.lags.to(slot.x.dtype) if by_lag else slot.masked
    mixing = mixing.double().requires_grad_()
    weight = None if by_lag else mixing[:, None]
    lags = mixing[:, None] if by_lag else None
    bias = {"fused": slot.narrow_bias, "autograd": slot.bias}.get(operation)
    if bias is not None:
        bias = bias.double().requires_grad_()
    ys = []
    dxs = []
    for x, dy, residual in zip(slot.x, slot.dy, slot.residual, strict=True):
        x = x[None].double().requires_grad_()
        residual = residual[None].double() if operation == "fused" else None
        y = plain.triangular_conv(x, weight, bias, residual, lags=lags)
        y.backward(dy[None].double())  # adds to the gradients of mixing and bias
        ys.append(y.detach().float())
        dxs.append(x.grad.float())
    y = torch.cat(ys)
    dx = torch.cat(dxs)
    if operation == "autograd":
        return mixing.grad, dx, bias.grad, y
    return ({"grad_input": dx, "grad_weight": mixing.grad}.get(operation, y),)


def check(variant: Variant, operation: str, expected: tuple[Tensor, ...], data: Data) -> dict:
    """{"error": largest relative RMSE, "failure": why it must not be timed, or None}."""
    try:
        with contextlib.nullcontext() if variant.compiled else poisoned(data.slots[0]):
            results = variant.standard(variant.call(0))
        results = results if isinstance(results, tuple) else (results,)
        errors = [rmse(*pair) for pair in zip(results, expected, strict=True)]
    except Exception as error:  # whatever it is, the other variants go on without this one
        return {"error": None, "failure": first_line(error)}
    error = max(errors, key=lambda value: math.inf if math.isnan(value) else value)
    if not error < MAX_ERROR:
        return {"error": str(error), "failure": f"wrong: relative RMSE {error:.2g} against fp64"}
    is_square = operation in GRADIENTS and variant.family != "by lag"
    if is_square and results[0].triu(1).any():
        return {"error": error, "failure": "wrong: not zero above the diagonal"}
    return {"error": error, "failure": None}


def rmse(result: Tensor, expected: Tensor) -> float:
    if result.shape != expected.shape:
        raise ValueError(f"shape {tuple(result.shape)} where {tuple(expected.shape)} was expected")
    expected = expected.float()
    return ((result.float() - expected).norm() / expected.norm()).item()


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
