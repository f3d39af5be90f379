"""`turn`: the norm and rotation of queries and keys before their products, in one pass over memory
each way. The kernels are in turning_kernels.py; elsewhere the same is done in plain PyTorch.
"""

import torch
from torch import Tensor

from mixer.ops import choice, plain

# turning_kernels is imported inside functions: it needs Triton, which a machine may not have.


def turn(
    x: Tensor,
    heads: int,
    *,
    norm: bool = True,
    rotation: tuple[Tensor, Tensor] | None = None,
    gain: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """An RMS norm in each head, then a rotation by position, then a gain.

    Args:
        x: (batch, tokens, heads * size), head after head, the size even; queries or keys.
        norm: divide a head's numbers by the root of the mean of their squares (arXiv 2010.04245).
        rotation: cosines and sines of angles (arXiv 2104.09864), two of (batch or 1, tokens, size /
            2) fp32. Number c of a head is turned with number c + size / 2. They have no gradient.
        gain: (heads * size,), which the result is multiplied by.
        backend: "dense" for plain PyTorch, else our kernels where those of `keyed_conv` can run.

    Returns:
        (batch, tokens, heads * size) in the dtype of x. Between, all is fp32.
    """
    size = x.shape[-1] // heads
    serves = backend != "dense" and choice.keyed_kernels_serve(
        x.device, x.dtype, size, size, x.shape[1]
    )
    if not serves:
        return plain.turn(x, heads, norm=norm, rotation=rotation, gain=gain)
    cos, sin = rotation or (None, None)
    return torch.ops.mixer.turn(x, heads, norm, cos, sin, gain)


@torch.library.custom_op("mixer::turn", mutates_args=())
def operator(
    x: Tensor, heads: int, norm: bool, cos: Tensor | None, sin: Tensor | None, gain: Tensor | None
) -> Tensor:
    from mixer.ops import turning_kernels

    return turning_kernels.forward(x, heads, norm, cos, sin, gain)


@operator.register_fake
def _(x, heads, norm, cos, sin, gain):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("mixer::turn_backward", mutates_args=())
def backward_operator(
    dy: Tensor, x: Tensor, heads: int, norm: bool,
    cos: Tensor | None, sin: Tensor | None, gain: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x, and of the gain in float32."""
    from mixer.ops import turning_kernels

    return turning_kernels.backward(dy, x, heads, norm, cos, sin, gain)


@backward_operator.register_fake
def _(dy, x, heads, norm, cos, sin, gain):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(x.shape[-1], dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, ctx.heads, ctx.norm, cos, sin, gain = inputs
    ctx.save_for_backward(x, cos, sin, gain)


def _backward(ctx, dy):
    if torch.is_grad_enabled():  # under create_graph=True
        raise NotImplementedError("second derivatives of turn are there with backend 'dense' alone")
    x, cos, sin, gain = ctx.saved_tensors
    dx, dgain = backward_operator(dy, x, ctx.heads, ctx.norm, cos, sin, gain)
    return dx, None, None, None, None, None if gain is None else dgain.to(gain.dtype)


operator.register_autograd(_backward, setup_context=_setup_context)
