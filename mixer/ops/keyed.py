"""Keyed mixing: `keyed_conv`, the operator `mixer::keyed_conv` and its autograd formula.

The kernels are in keyed_kernels.py. Where they cannot serve, and where nobody has chosen them, the
same is done in plain PyTorch, which autograd and torch.compile see through.
"""

import torch
from torch import Tensor

from mixer.models.masked_mixer import plain
from mixer.models.masked_mixer.plain import BACKENDS
from mixer.ops import choice

# keyed_kernels is imported inside functions: it needs Triton, which a machine may not have.


def keyed_conv(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor, backend: str = "auto"
) -> Tensor:
    """A triangular convolution whose weights are scaled by how well queries fit keys:

        y[b, i, c] = bias[h, i] + sum_{j <= i} weight[h, 0, i, j] * f[i, j] * value[b, j, c]
        f[i, j] = exp(s[i, j]) / mean_{j <= i} exp(s[i, j])
        s[i, j] = query[b, i, h] . key[b, j, h] / sqrt(n), of n numbers each

    Where all keys fit alike, f is 1, and this is a triangular convolution. Without the weight it is
    softmax attention (arXiv 1706.03762) times the number of tokens that a query sees.

    Args:
        query, key: (batch, tokens, heads * n), head after head; bf16, fp16, fp32 or fp64.
        value: (batch, tokens, channels) in their dtype, head after head.
        weight: (heads, 1, context, context), out then in, with context >= tokens, in their dtype or
            fp32. The strictly upper triangle is never read, and its gradient is exactly zero.
        bias: (heads, context), in the weight's dtype.
        backend: "cuda" or "auto" for our kernels, which keep no product of two tokens in memory,
            where they can run (compute capability 8.0 and newer, Triton, all dtypes but fp64).
            "dense", and elsewhere, for plain PyTorch.

    Returns:
        y: (batch, tokens, channels) in the dtype of value. Under autocast query, key and value are
            cast to the autocast dtype first.

    Raises:
        ValueError: shapes or the backend's name do not fit.
        NotImplementedError: second derivatives where the kernels ran.
    """
    device = query.device
    may_cast = not query.is_meta and query.dtype != torch.float64
    if may_cast and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    _check(query, key, value, weight, bias, backend)
    heads, _, context, _ = weight.shape
    sizes = (heads, query.shape[-1] // heads, value.shape[-1] // heads, context)
    if backend != "dense" and choice.keyed_kernels_serve(device, query.dtype, *sizes):
        return torch.ops.mixer.keyed_conv(query, key, value, weight, bias)[0]
    return plain.keyed(query, key, value, weight, bias)


def _check(query, key, value, weight, bias, backend) -> None:
    """Raises ValueError for arguments that do not fit, for which the kernels would read and write
    out of bounds. One expression, because this runs for each block and step.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    heads, _, context, _ = weight.shape
    batch, tokens, width = query.shape
    fits = (
        heads > 0
        and weight.shape == (heads, 1, context, context)
        and bias.shape == (heads, context)
        and 1 <= tokens <= context
        and key.shape == query.shape
        and value.shape[:2] == (batch, tokens)
        and width % heads == 0
        and value.shape[-1] % heads == 0
        and query.dtype == key.dtype == value.dtype
        and weight.dtype == bias.dtype
        and weight.dtype in (query.dtype, torch.float32)
        and query.device == key.device == value.device == weight.device == bias.device
    )
    if not fits:
        given = {"query": query, "key": key, "value": value, "weight": weight, "bias": bias}
        described = (
            f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            for name, tensor in given.items()
        )
        raise ValueError(
            f"keyed_conv got {', '.join(described)}; they must be on one device: query and key "
            "(batch, tokens, heads * size of a key) and value (batch, tokens, channels) of one "
            "dtype, weight (heads, 1, context, context) with context >= tokens and bias (heads, "
            "context), both of that dtype or float32"
        )


@torch.library.custom_op("mixer::keyed_conv", mutates_args=())
def operator(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, packed weight, level (batch, heads, tokens) float32), which backward reads again."""
    from mixer.ops import keyed_kernels

    packed = keyed_kernels.pack(weight, query.shape[1], query.dtype)
    y, level = keyed_kernels.forward(query, key, value, packed, bias)
    return y, packed, level


@operator.register_fake
def _(query, key, value, weight, bias):
    tokens = query.shape[1]
    packed = query.new_empty((weight.shape[0], tokens, tokens))
    means = (query.shape[0], weight.shape[0], tokens)
    y = torch.empty_like(value, memory_format=torch.contiguous_format)
    return y, packed, query.new_empty(means, dtype=torch.float32)


@torch.library.custom_op("mixer::keyed_conv_grad_input", mutates_args=())
def grad_input(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, packed: Tensor, level: Tensor
) -> Tensor:
    """Those of query, key and value side by side: they are mostly parts of one projection, whose
    gradient this is then, without a copy in compiled code.
    """
    from mixer.ops import keyed_kernels

    return keyed_kernels.grad_input(dy, query, key, value, packed, level)


@grad_input.register_fake
def _(dy, query, key, value, packed, level):
    channels = sum(x.shape[-1] for x in (query, key, value))
    return query.new_empty((*query.shape[:2], channels))


@torch.library.custom_op("mixer::keyed_conv_grad_weight", mutates_args=())
def grad_weight(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, level: Tensor, context: int
) -> Tensor:
    from mixer.ops import keyed_kernels

    return keyed_kernels.grad_weight(dy, query, key, value, level, context)


@grad_weight.register_fake
def _(dy, query, key, value, level, context):
    return query.new_empty((level.shape[1], 1, context, context), dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    query, key, value, weight, bias = inputs
    _, packed, level = output
    ctx.mark_non_differentiable(packed, level)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, packed, level)
    ctx.heads, _, ctx.context, _ = weight.shape
    ctx.weight_dtype = weight.dtype


def _backward(ctx, dy, *_):
    # Under create_graph=True. Autograd's own error would miss the path to the weight through its
    # packed copy, and leave out terms without a word.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "second derivatives of keyed_conv are there in plain PyTorch alone: use backend "
            "'dense' (for a model, load it with mixing_backend='dense')"
        )
    if dy is None:
        return None, None, None, None, None
    query, key, value, packed, level = ctx.saved_tensors
    needs_weight, needs_bias = ctx.needs_input_grad[3:]
    inputs, dweight, dbias = (None, None, None), None, None
    if any(ctx.needs_input_grad[:3]):
        parts = [x.shape[-1] for x in (query, key, value)]
        # Not dim=-1: the compiler leaves out the copy only where it sees its own 2 in both places.
        inputs = grad_input(dy, query, key, value, packed, level)
        inputs = inputs.split(parts, dim=2)
    if needs_weight:
        dweight = grad_weight(dy, query, key, value, level, ctx.context)
        dweight = dweight.to(ctx.weight_dtype)
    if needs_bias:  # (batch, tokens, heads, channels of a head) -> (heads, tokens)
        sums = dy.unflatten(-1, (ctx.heads, -1)).sum((0, 3), dtype=torch.float32).T
        dbias = torch.nn.functional.pad(sums, (0, ctx.context - sums.shape[1]))
        dbias = dbias.to(ctx.weight_dtype)
    return *inputs, dweight, dbias


operator.register_autograd(_backward, setup_context=_setup_context)
