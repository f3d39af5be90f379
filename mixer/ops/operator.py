"""The operator `mixer::triangular_conv`: its fake kernels and its autograd formula.

The backends `panels` and `cuda` share it: the module of each has the functions pack, forward,
grad_input and grad_weight. The weight is packed (masked, cast, padded) once in forward, and the
packed copy is saved for backward. `dense` is registered beside it as a composite operator, which
autograd and torch.compile see through: the baseline gets every fusion the compiler has.

Outside the compiler a plain autograd function calls the same four functions: the dispatch of a
custom operator nearly doubles the host's time for a forward and backward, which at short contexts
is longer than the GPU's.
"""

import torch
from torch import Tensor

from mixer.models.masked_mixer import plain
from mixer.ops import choice, cuda, panels

# Refused here, because torch's own once_differentiable refuses too little: torch.autograd.grad with
# respect to an argument goes round its error, and leaves out terms of a Hessian without a word.
ONLY_DENSE = (
    "of triangular_conv are there with backend 'dense' alone: use it here (for a model, load it "
    "with mixing_backend='dense')"
)


def _module(backend: str, x: Tensor, heads: int, taps: int):
    """The module whose four functions run for x."""
    return {"cuda": cuda, "panels": panels}[choice.resolve_backend(backend, x, heads, taps)]


@torch.library.custom_op("mixer::triangular_conv", mutates_args=())
def triangular_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """(y, packed weight); arguments were checked by `mixer.ops.triangular_conv`."""
    module = _module(backend, x, *weight.shape[:2])
    packed = module.pack(weight, x.shape[1], x.dtype)
    return module.forward(x, packed, bias, residual), packed


@triangular_conv.register_fake
def _(x, weight, bias, residual, backend):
    heads, taps = weight.shape[:2]
    tokens = x.shape[1]
    packed = x.new_empty((heads, taps, tokens, panels.packed_columns(tokens)))
    return torch.empty_like(x, memory_format=torch.contiguous_format), packed


@torch.library.custom_op("mixer::triangular_conv_grad_input", mutates_args=())
def grad_input(dy: Tensor, packed: Tensor, backend: str) -> Tensor:
    return _module(backend, dy, *packed.shape[:2]).grad_input(dy, packed)


@grad_input.register_fake
def _(dy, packed, backend):
    return torch.empty_like(dy, memory_format=torch.contiguous_format)


@torch.library.custom_op("mixer::triangular_conv_grad_weight", mutates_args=())
def grad_weight(
    dy: Tensor,
    x: Tensor,
    context: int,
    taps: int,
    heads: int,
    dtype: torch.dtype,
    with_bias: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    module = _module(backend, x, heads, taps)
    return module.grad_weight(dy, x, context, taps, heads, dtype, with_bias)


@grad_weight.register_fake
def _(dy, x, context, taps, heads, dtype, with_bias, backend):
    dweight = dy.new_empty((heads, taps, context, context), dtype=dtype)
    dbias = dy.new_empty((heads, context) if with_bias else (0,), dtype=dtype)
    return dweight, dbias


def _setup_context(ctx, inputs, output):
    x, weight, _, _, ctx.backend = inputs
    _, packed = output
    ctx.mark_non_differentiable(packed)
    ctx.set_materialize_grads(False)
    _save(ctx, x, weight, packed)


def _save(ctx, x: Tensor, weight: Tensor, packed: Tensor) -> None:
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    # Nothing is kept that no gradient will ask for.
    ctx.save_for_backward(x if needs_weight or needs_bias else None, packed if needs_x else None)
    ctx.heads, ctx.taps, ctx.context = weight.shape[:3]
    ctx.weight_dtype = weight.dtype


def _gradients(ctx, dy: Tensor | None, input_gradient, weight_gradient, *backend: str):
    """Gradients for (x, weight, bias, residual, backend), by a backend module's functions or by the
    operators, which take the backend's name as their last argument.
    """
    if torch.is_grad_enabled():  # under create_graph=True: a second derivative is asked for
        raise NotImplementedError(f"second derivatives {ONLY_DENSE}")
    if dy is None:
        return None, None, None, None, None
    x, packed = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual, _ = ctx.needs_input_grad
    dx = input_gradient(dy, packed, *backend) if needs_x else None
    dweight = dbias = None
    if needs_weight or needs_bias:
        sizes = (ctx.context, ctx.taps, ctx.heads)
        dweight, dbias = weight_gradient(dy, x, *sizes, ctx.weight_dtype, needs_bias, *backend)
    dweight, dbias = dweight if needs_weight else None, dbias if needs_bias else None
    return dx, dweight, dbias, dy if needs_residual else None, None


def _backward(ctx, dy, _):
    return _gradients(ctx, dy, grad_input, grad_weight, ctx.backend)


triangular_conv.register_autograd(_backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The operator's forward and backward without its dispatch."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, backend):
        ctx.module = _module(backend, x, *weight.shape[:2])
        packed = ctx.module.pack(weight, x.shape[1], x.dtype)
        ctx.set_materialize_grads(False)
        _save(ctx, x, weight, packed)
        return ctx.module.forward(x, packed, bias, residual)

    @staticmethod
    def backward(ctx, dy):
        return _gradients(ctx, dy, ctx.module.grad_input, ctx.module.grad_weight)


def apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, backend: str
) -> Tensor:
    """y by the operator, or by the plain autograd function where nobody needs to see an operator:
    outside the compiler, dispatch modes and tensor subclasses.
    """
    plain = type(x) is Tensor or type(x) is torch.nn.Parameter
    if plain and not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0:
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(f"torch.func's transforms {ONLY_DENSE}")
        return _Eager.apply(x, weight, bias, residual, backend)
    return triangular_conv(x, weight, bias, residual, backend)[0]


_library = torch.library.Library("mixer", "FRAGMENT")
_library.define(
    "triangular_conv_dense(Tensor x, Tensor weight, Tensor? bias, Tensor? residual) -> Tensor"
)
_library.impl("triangular_conv_dense", plain.dense, "CompositeImplicitAutograd")
