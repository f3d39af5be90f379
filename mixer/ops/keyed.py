"""Keyed mixing: `keyed_conv`, the operators `mixer::keyed_conv` and `mixer::keyed_conv_by_lag`, and
their autograd formula.

The kernels are in keyed_kernels.py. Where they cannot serve, and where nobody has chosen them, the
same is done in plain PyTorch, which autograd and torch.compile see through.
"""

import torch
from torch import Tensor

from mixer.ops import choice, plain
from mixer.ops.plain import BACKENDS
from mixer.ops.strips import strips_of

# keyed_kernels is imported inside functions: it needs Triton, which a machine may not have.


def keyed_conv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    lags: Tensor | None = None,
    decay: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """A triangular convolution whose weights are scaled by how well queries fit keys:

        y[b, i, c] = bias[h, i] + sum_{j <= i} weight[h, 0, i, j] * f[i, j] * value[b, j, c]
        f[i, j] = exp(s[i, j]) / mean_{j <= i} exp(s[i, j])
        s[i, j] = query[b, i, h] . key[b, j, h] / sqrt(n), of n numbers each

    Where all keys fit alike, f is 1, and this is a triangular convolution. Without the weight it is
    softmax attention (arXiv 1706.03762) times the number of tokens that a query sees.

    The weight is given in full, or by lags: then it is, and nothing of its size is in memory,

        weight[h, 0, i, j] = lags[h, 0, i - j] + falling[i - j] / sum_{l <= i} falling[l]
        falling[l] = exp(-l * decay[h])

    Args:
        query, key: (batch, tokens, heads * n), head after head; bf16, fp16, fp32 or fp64.
        value: (batch, tokens, channels) in their dtype, head after head.
        weight: (heads, 1, context, context), out then in, with context >= tokens, in their dtype or
            fp32. The strictly upper triangle is never read, and its gradient is exactly zero.
        bias: (heads, context), in the dtype of weight or lags.
        lags: (heads, 1, context), in place of weight. Those from tokens on are not read.
        decay: (heads,) fp32, none negative, with lags alone; has no gradient. None: without the
            second term.
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
    _check(query, key, value, weight, bias, lags, decay, backend)
    heads, context = bias.shape
    tokens = query.shape[1]
    sizes = (heads, query.shape[-1] // heads, value.shape[-1] // heads, context)
    if backend != "dense" and choice.keyed_kernels_serve(device, query.dtype, *sizes):
        if lags is None:
            return torch.ops.mixer.keyed_conv(query, key, value, weight, bias)[0]
        strips = strips_of(lags, decay, tokens, query.dtype)
        return torch.ops.mixer.keyed_conv_by_lag(query, key, value, lags, bias, *strips)[0]
    return plain.keyed_conv(query, key, value, weight, bias, lags=lags, decay=decay)


def _check(query, key, value, weight, bias, lags, decay, backend) -> None:
    """Raises ValueError for arguments that do not fit, for which the kernels would read and write
    out of bounds. One expression, because this runs for each block and step.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    given = {"query": query, "key": key, "value": value, "weight": weight, "bias": bias}
    given |= {"lags": lags, "decay": decay}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    mixing = weight if lags is None else lags
    batch, tokens, width = query.shape
    fits = (
        (weight is None) != (lags is None)
        and bias is not None
        and mixing.ndim > 2
        and (heads := mixing.shape[0]) > 0
        and bias.shape == (heads, context := mixing.shape[-1])
        and mixing.shape == ((heads, 1, context, context) if lags is None else (heads, 1, context))
        and (decay is None or lags is not None and decay.shape == (heads,))
        and 1 <= tokens <= context
        and key.shape == query.shape
        and value.shape[:2] == (batch, tokens)
        and width % heads == 0
        and value.shape[-1] % heads == 0
        and query.dtype == key.dtype == value.dtype
        and mixing.dtype == bias.dtype
        and mixing.dtype in (query.dtype, torch.float32)
        and all(tensor.device == query.device for tensor in given.values())
    )
    if not fits:
        described = (
            f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            for name, tensor in given.items()
        )
        raise ValueError(
            f"keyed_conv got {', '.join(described)}; they must be on one device: query and key "
            "(batch, tokens, heads * size of a key) and value (batch, tokens, channels) of one "
            "dtype, either weight (heads, 1, context, context) or lags (heads, 1, context) with "
            "context >= tokens, and bias (heads, context), both of that dtype or float32; with "
            "lags also decay (heads,)"
        )


# ------------------------------------------------------------------------- the operators


@torch.library.custom_op("mixer::keyed_conv", mutates_args=())
def operator(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, packed weight, level (batch, heads, tokens) float32), which backward reads again."""
    from mixer.ops import keyed_kernels

    packed = keyed_kernels.pack(weight, query.shape[1], query.dtype)
    y, level = keyed_kernels.forward(query, key, value, keyed_kernels.Weights(packed), bias)
    return y, packed, level


@operator.register_fake
def _(query, key, value, weight, bias):
    tokens = query.shape[1]
    packed = query.new_empty((weight.shape[0], tokens, tokens))
    y, level = _empty_results(query, value, bias)
    return y, packed, level


@torch.library.custom_op("mixer::keyed_conv_by_lag", mutates_args=())
def operator_by_lag(
    query: Tensor, key: Tensor, value: Tensor, lags: Tensor, bias: Tensor,
    strips: Tensor, rest: Tensor, falls: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, level), from what `strips_of` makes of the lags, which are here for their gradient."""
    from mixer.ops import keyed_kernels

    weights = keyed_kernels.Weights(strips, rest, falls)
    return keyed_kernels.forward(query, key, value, weights, bias)


@operator_by_lag.register_fake
def _(query, key, value, lags, bias, strips, rest, falls):
    return _empty_results(query, value, bias)


def _empty_results(query: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(value, memory_format=torch.contiguous_format)
    means = (query.shape[0], bias.shape[0], query.shape[1])
    return y, query.new_empty(means, dtype=torch.float32)


@torch.library.custom_op("mixer::keyed_conv_grad_input", mutates_args=())
def grad_input(
    dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, level: Tensor,
    weights: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value side by side: they are mostly parts of one projection,
    whose gradient this is then, without a copy in compiled code. And dy summed over the channels of
    a head, (batch, heads, tokens) float32. `weights` is the packed weight, or what strips_of made.
    """
    from mixer.ops import keyed_kernels

    weights = keyed_kernels.Weights(*weights)
    return keyed_kernels.grad_input(dy, y, query, key, value, weights, bias, level)


@grad_input.register_fake
def _(dy, y, query, key, value, bias, level, weights):
    channels = sum(x.shape[-1] for x in (query, key, value))
    return query.new_empty((*query.shape[:2], channels)), torch.empty_like(level)


@torch.library.custom_op("mixer::keyed_conv_grad_weight", mutates_args=())
def grad_weight(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, level: Tensor, context: int
) -> Tensor:
    from mixer.ops import keyed_kernels

    return keyed_kernels.grad_weight(dy, query, key, value, level, context)


@grad_weight.register_fake
def _(dy, query, key, value, level, context):
    return query.new_empty((level.shape[1], 1, context, context), dtype=torch.float32)


@torch.library.custom_op("mixer::keyed_conv_grad_lags", mutates_args=())
def grad_lags(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, level: Tensor, context: int
) -> Tensor:
    from mixer.ops import keyed_kernels

    return keyed_kernels.grad_lags(dy, query, key, value, level, context)


@grad_lags.register_fake
def _(dy, query, key, value, level, context):
    return query.new_empty((level.shape[1], 1, context), dtype=torch.float32)


# ------------------------------------------------------------------------- their gradients


def _setup_context(ctx, inputs, output):
    query, key, value, weight, bias = inputs
    y, packed, level = output
    ctx.mark_non_differentiable(packed, level)
    _keep(ctx, y, query, key, value, weight, bias, level, packed)


def _setup_context_by_lag(ctx, inputs, output):
    query, key, value, lags, bias, *strips = inputs
    y, level = output
    ctx.mark_non_differentiable(level)
    _keep(ctx, y, query, key, value, lags, bias, level, *strips)


def _keep(ctx, y, query, key, value, mixing, bias, level, *weights):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, query, key, value, bias, level, *weights)
    ctx.context, ctx.dtype = mixing.shape[-1], mixing.dtype


def _backward(ctx, dy, *_):
    return _gradients(ctx, dy, grad_weight)


def _backward_by_lag(ctx, dy, *_):
    return *_gradients(ctx, dy, grad_lags), None, None, None


def _gradients(ctx, dy, grad_mixing):
    """Those of query, key, value, weight or lags, and bias."""
    # Under create_graph=True. Autograd's own error would miss the path to the weight through its
    # packed copy, and leave out terms without a word.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "second derivatives of keyed_conv are there in plain PyTorch alone: use backend "
            "'dense' (for a model, load it with mixing_backend='dense')"
        )
    if dy is None:
        return None, None, None, None, None
    y, query, key, value, bias, level, *weights = ctx.saved_tensors
    needs_mixing, needs_bias = ctx.needs_input_grad[3:5]
    inputs, dmixing, dbias = (None, None, None), None, None
    if any(ctx.needs_input_grad[:3]) or needs_bias:
        parts = [x.shape[-1] for x in (query, key, value)]
        # Not dim=-1: the compiler leaves out the copy only where it sees its own 2 in both places.
        inputs, sums = grad_input(dy, y, query, key, value, bias, level, weights)
        inputs = inputs.split(parts, dim=2)
    if needs_mixing:
        dmixing = grad_mixing(dy, query, key, value, level, ctx.context).to(ctx.dtype)
    if needs_bias:  # (batch, heads, tokens) -> (heads, context)
        dbias = torch.nn.functional.pad(sums.sum(0), (0, ctx.context - sums.shape[-1]))
        dbias = dbias.to(ctx.dtype)
    return *inputs, dmixing, dbias


operator.register_autograd(_backward, setup_context=_setup_context)
operator_by_lag.register_autograd(_backward_by_lag, setup_context=_setup_context_by_lag)
