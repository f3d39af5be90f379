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
    slot, ys, dxs = data.slots[0], [], []
    if operation == "pack":
        return (slot.masked,)
    weight = slot.lags.to(slot.x.dtype) if by_lag else slot.masked
    weight = weight.double().requires_grad_()
    full, lags = (None, weight[:, None]) if by_lag else (weight[:, None], None)
    bias = {"fused": slot.narrow_bias, "autograd": slot.bias}.get(operation)
    bias = None if bias is None else bias.double().requires_grad_()
    for x, dy, residual in zip(slot.x, slot.dy, slot.residual, strict=True):
        x = x[None].double().requires_grad_()
        residual = residual[None].double() if operation == "fused" else None
        y = plain.triangular_conv(x, full, bias, residual, lags=lags)
        y.backward(dy[None].double())  # adds to the gradients of weight and bias
        ys.append(y.detach().float())
        dxs.append(x.grad.float())
    y, dx, dweight = torch.cat(ys), torch.cat(dxs), weight.grad
    if operation == "autograd":
        return dweight, dx, bias.grad, y
    return ({"grad_input": dx, "grad_weight": dweight}.get(operation, y),)


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
    found, wanted = found.float(), wanted.float()
    return ((found - wanted).norm() / wanted.norm()).item()


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
