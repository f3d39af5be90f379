"""The operator `mixer::triangular_conv`, which calls the CUDA kernels: its fake kernels and its
autograd formula.

The weight is packed (masked, cast, padded) once in forward, and the packed copy is saved for
backward. The kernels have one tap; several are a sum of calls. Weights are (heads, taps, context,
context), those by lag (heads, taps, context); the operators take one tap, without that dimension.
"""

import torch
from torch import Tensor

from mixer.ops import cuda
from mixer.ops.plain import shift_channels, tap_shift


def triangular_conv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None):
    """y, given a weight of either kind; `mixer.ops.triangular_conv` has checked the arguments."""
    heads, taps = weight.shape[:2]
    if taps == 1:
        return one_tap(x, weight.squeeze(1), bias, residual)[0]
    parts = x.unflatten(-1, (heads, -1))  # (batch, tokens, heads, channels of a head)
    y = residual
    for tap, part in enumerate(weight.unbind(1)):
        shifted = shift_channels(parts, tap_shift(tap, taps)).flatten(2)
        y = one_tap(shifted, part, bias if tap == 0 else None, y)[0]
    return y


@torch.library.custom_op("mixer::triangular_conv", mutates_args=())
def one_tap(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(y, packed weight)."""
    packed = cuda.pack(weight, x.shape[1], x.dtype)
    return cuda.forward(x, packed, bias, residual, weight.dim() == 2), packed


@one_tap.register_fake
def _(x, weight, bias, residual):
    packed = x.new_empty(cuda.packed_shape(weight.shape[0], x.shape[1], weight.dim() == 2))
    return torch.empty_like(x, memory_format=torch.contiguous_format), packed


@torch.library.custom_op("mixer::triangular_conv_grad_input", mutates_args=())
def grad_input(dy: Tensor, packed: Tensor, by_lag: bool) -> Tensor:
    return cuda.grad_input(dy, packed, by_lag)


@grad_input.register_fake
def _(dy, packed, by_lag):
    return torch.empty_like(dy, memory_format=torch.contiguous_format)


@torch.library.custom_op("mixer::triangular_conv_grad_weight", mutates_args=())
def grad_weight(
    dy: Tensor,
    x: Tensor,
    context: int,
    heads: int,
    dtype: torch.dtype,
    with_bias: bool,
    by_lag: bool,
) -> tuple[Tensor, Tensor]:
    return cuda.grad_weight(dy, x, context, heads, dtype, with_bias, by_lag)


@grad_weight.register_fake
def _(dy, x, context, heads, dtype, with_bias, by_lag):
    dweight = dy.new_empty((heads, context) if by_lag else (heads, context, context), dtype=dtype)
    dbias = dy.new_empty((heads, context) if with_bias else (0,), dtype=dtype)
    return dweight, dbias


def _setup_context(ctx, inputs, output):
    x, weight, _, _ = inputs
    _, packed = output
    ctx.mark_non_differentiable(packed)
    ctx.set_materialize_grads(False)
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    # Nothing is kept that no gradient will ask for.
    ctx.save_for_backward(x if needs_weight or needs_bias else None, packed if needs_x else None)
    ctx.heads, ctx.context = weight.shape[:2]
    ctx.weight_dtype, ctx.by_lag = weight.dtype, weight.dim() == 2


def _backward(ctx, dy, _):
    # Under create_graph=True. torch's own once_differentiable refuses too little:
    # torch.autograd.grad with respect to an argument goes round its error, and leaves out terms of
    # a Hessian without a word.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "second derivatives of triangular_conv are there with backend 'dense' alone: use it "
            "here (for a model, load it with mixing_backend='dense')"
        )
    if dy is None:
        return None, None, None, None
    x, packed = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad
    dx = grad_input(dy, packed, ctx.by_lag) if needs_x else None
    dweight = dbias = None
    if needs_weight or needs_bias:
        sizes = (ctx.context, ctx.heads, ctx.weight_dtype)
        dweight, dbias = grad_weight(dy, x, *sizes, needs_bias, ctx.by_lag)
    dweight, dbias = dweight if needs_weight else None, dbias if needs_bias else None
    return dx, dweight, dbias, dy if needs_residual else None


one_tap.register_autograd(_backward, setup_context=_setup_context)
