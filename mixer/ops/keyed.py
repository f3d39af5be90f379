"""Keyed mixing: `keyed_conv`, the operator `mixer::keyed_conv` and its autograd formula.

The kernels are in keyed_kernels.py, and the mixing weights as they read them in strips.py. Where
they cannot run, plain PyTorch computes the same.
"""

import functools
import importlib.util
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mixer.common.errors import first_line
from mixer.ops import cuda, plain, selftest
from mixer.ops.arguments import require, warn_once
from mixer.ops.plain import in_autocast_dtype
from mixer.ops.registration import (
    constant_in_a_graph,
    operator,
    refuse_second_derivatives,
    without_derivative,
)
from mixer.ops.strips import Weights, weights_of

# keyed_kernels is imported inside functions: it needs Triton, which a machine may not have.
HAS_TRITON = importlib.util.find_spec("triton") is not None
SIZES = (16, 32, 64, 128)  # of a key, and of a value: numbers of each in a head
MOST_CONTEXT = 1 << 15  # the kernels count places in one head's weights in 32 bits


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
    """A triangular convolution whose weights are scaled by how well queries match keys:

        y[b, i, c] = bias[h, i] + sum_{j <= i} weight[h, 0, i, j] * f[i, j] * value[b, j, c]
        f[i, j] = exp(s[i, j]) / mean_{j <= i} exp(s[i, j])
        s[i, j] = query[b, i, h] . key[b, j, h] / sqrt(n), of n numbers each

    If all keys match equally, f is 1, and this is a triangular convolution. Without the weight, it
    is softmax attention (arXiv 1706.03762) times the number of tokens that a query sees.

    Pass the weight in full, or by lag. By lag, our kernels never store it in full; it is

        weight[h, 0, i, j] = lags[h, 0, i - j] + falling[i - j] / sum_{l <= i} falling[l]
        falling[l] = exp(-l * decay[h])

    Args:
        query, key: (batch, tokens, heads * n), head after head; bf16, fp16, fp32 or fp64.
        value: (batch, tokens, channels) in their dtype, head after head.
        weight: (heads, 1, context, context), output first; context >= tokens, in their dtype or
            fp32. The strictly upper triangle is never read, and its gradient is exactly zero.
        bias: (heads, context), in the dtype of weight or lags, or None.
        lags: (heads, 1, context), instead of weight. In a text past the context, each token mixes,
            sums and averages the last `context` tokens, with the last bias, in plain PyTorch.
        decay: (heads,) fp32, not negative; only with lags. It gets no gradient. None drops the
            second term.
        backend: "cuda" and "auto" mean the same here: our kernels, which never store the score
            matrix, where they can run (compute capability 8.0 and newer, Triton, all dtypes but
            fp64), and plain PyTorch elsewhere. triangular_conv raises an error there for "cuda",
            but a model has one backend for both, and may need ours for its convolutions alone.
            "dense": plain PyTorch.

    Returns:
        y: (batch, tokens, channels) in the dtype of value. Under autocast query, key and value are
            cast to the autocast dtype first.

    Raises:
        ValueError: shapes or the backend's name do not fit.
        NotImplementedError: second derivatives where the kernels ran.
    """
    query, key, value = in_autocast_dtype(query, key, value)
    _check(query, key, value, weight, bias, lags, decay, backend)
    mixing = weight if lags is None else lags
    assert mixing is not None  # or _check would have raised
    heads = mixing.shape[0]
    context = mixing.shape[-1]
    if bias is None:
        bias = mixing.new_zeros(heads, context)
    tokens = query.shape[1]
    key_size = query.shape[-1] // heads
    value_size = value.shape[-1] // heads
    if (
        backend != "dense"
        and tokens <= context
        and uses_kernels(query.device, query.dtype, key_size, value_size, context, lags is not None)
    ):
        return by_kernels(query, key, value, mixing, bias, decay)
    return plain.keyed_conv(query, key, value, weight, bias, lags=lags, decay=decay)


def _check(query, key, value, weight, bias, lags, decay, backend) -> None:
    allowed = (
        "query and key (batch, tokens, heads * size of a key) and value (batch, tokens, channels) "
        "of one dtype; either weight (heads, 1, context, context) with context >= tokens, or lags "
        "(heads, 1, context), of that dtype or float32; bias (heads, context), of their dtype or "
        "None; with lags also decay (heads,)"
    )
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "weight": weight,
        "lags": lags,
        "decay": decay,
        "bias": bias,
    }
    rules = _rules(query, key, value, weight, bias, lags, decay)
    require(rules, backend, "keyed_conv", allowed, tensors)


def _rules(query, key, value, weight, bias, lags, decay) -> Iterator[tuple[str, bool]]:
    """As in `triangular_conv`."""
    yield "either weight or lags", (weight is None) != (lags is None)
    by_lag = lags is not None
    name = "lags" if by_lag else "weight"
    mixing = lags if by_lag else weight
    yield "query and value of 3 dimensions", query.dim() == value.dim() == 3
    dimensions = 3 if by_lag else 4
    yield f"{name} of {dimensions} dimensions", mixing.dim() == dimensions
    heads = mixing.shape[0]
    context = mixing.shape[-1]
    if by_lag:
        yield "lags (heads, 1, context)", heads > 0 and mixing.shape == (heads, 1, context)
    else:
        square = (heads, 1, context, context)
        yield "weight (heads, 1, context, context)", heads > 0 and mixing.shape == square
    yield "bias (heads, context)", bias is None or bias.shape == (heads, context)
    fits = decay is None or (by_lag and decay.shape == (heads,))
    yield "decay (heads,), with lags", fits
    yield "1 token or more", query.shape[1] > 0
    yield "a context of all tokens", by_lag or query.shape[1] <= context
    yield "key of query's shape", key.shape == query.shape
    yield "value with query's batch and tokens", value.shape[:2] == query.shape[:2]
    fits = query.shape[2] % heads == 0 and value.shape[2] % heads == 0
    yield "heads that divide the channels", fits
    yield "query, key and value of one dtype", query.dtype == key.dtype == value.dtype
    yield f"{name} and bias of one dtype", bias is None or bias.dtype == mixing.dtype
    yield f"{name} in query's dtype or float32", mixing.dtype in (query.dtype, torch.float32)


@constant_in_a_graph
def uses_kernels(
    device: torch.device,
    dtype: torch.dtype,
    key_size: int,
    value_size: int,
    context: int,
    by_lag: bool,
) -> bool:
    """Whether `keyed_conv` uses the kernels for keys and values of so many numbers in each head.
    Where they cannot take a GPU tensor, or fail on its GPU, the log says so, once.
    """
    if device.type != "cuda":
        return False
    supports = (
        torch.version.hip is None
        and HAS_TRITON
        and cuda.device_facts(device.index)[0] >= 80
        and dtype in (torch.float32, torch.float16, torch.bfloat16)
        and key_size in SIZES
        and value_size in SIZES
        and context <= MOST_CONTEXT
    )
    if not supports:
        warn_once(
            f"keyed mixing runs without kernels for {dtype}, keys of {key_size} and values of "
            f"{value_size} numbers in a head, and a context of {context}; they take float32, "
            f"float16 and bfloat16, {', '.join(map(str, SIZES))} numbers and contexts up to "
            f"{MOST_CONTEXT}, on NVIDIA GPUs of compute capability 8.0 or newer with Triton "
            "(`pip install triton`)"
        )
    problem = fault(device, dtype, key_size, value_size, by_lag) if supports else None
    if problem:
        warn_once(f"keyed mixing runs without kernels, which fail on this GPU: {problem}")
    return supports and problem is None


@functools.cache
@selftest.in_own_thread
def fault(
    device: torch.device, dtype: torch.dtype, key_size: int, value_size: int, by_lag: bool
) -> str | None:
    """What is wrong with the kernels for such keys and values; None if nothing is. The first call
    compiles them and waits for the device, so it must not come inside a graph capture.
    """
    batch, heads, context = 2, 2, 256
    mixing_shape = (heads, 1, context) if by_lag else (heads, 1, context, context)
    decay = torch.full((heads,), 1 / context, device=device) if by_lag else None
    shapes = {
        "query": (batch, context, heads * key_size),
        "key": (batch, context, heads * key_size),
        "value": (batch, context, heads * value_size),
        "lags" if by_lag else "weight": mixing_shape,
        "bias": (heads, context),
    }

    def expected(query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, bias: Tensor) -> Tensor:
        if by_lag:
            return plain.keyed_conv(query, key, value, None, bias, lags=mixing, decay=decay)
        return plain.keyed_conv(query, key, value, mixing, bias)

    try:
        return selftest.compare(
            functools.partial(by_kernels, decay=decay), expected, shapes, device, dtype
        )
    except Exception as error:  # what Triton and CUDA raise has no type of its own
        return first_line(error)


def by_kernels(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, bias: Tensor, decay: Tensor | None
) -> Tensor:
    """`keyed_conv` by the kernels; mixing is a weight or lags."""
    weights = weights_of(mixing, decay, query.shape[1], query.dtype)
    return torch.ops.mixer.keyed_conv(query, key, value, mixing, bias, *weights)[0]


# ------------------------------------------------------------------------- the operators


@operator("mixer::keyed_conv")
def values_and_levels(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, bias: Tensor,
    tiles: Tensor, rest: Tensor | None, falls: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, level (batch, heads, tokens) float32), from what `weights_of` makes of mixing,
    a weight or lags, which is here for its gradient.
    """
    from mixer.ops import keyed_kernels

    return keyed_kernels.forward(query, key, value, Weights(tiles, rest, falls), bias)


@torch.library.register_fake("mixer::keyed_conv")
def _(query, key, value, mixing, bias, tiles, rest, falls):
    y = torch.empty_like(value, memory_format=torch.contiguous_format)
    batch, tokens, _ = query.shape
    heads = bias.shape[0]
    return y, query.new_empty((batch, heads, tokens), dtype=torch.float32)


@operator("mixer::keyed_conv_gradients")
def gradients(
    dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, level: Tensor,
    tiles: Tensor, rest: Tensor | None, falls: Tensor | None,
    context: int, by_lag: bool, of_mixing: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value side by side: they are mostly parts of one projection,
    whose gradient this is then, without a copy in compiled code; dy summed over the channels of a
    head, (batch, heads, tokens) float32; and in float32, unless not asked for, that of the mixing.
    """
    from mixer.ops import keyed_kernels

    weights = Weights(tiles, rest, falls)
    inputs, sums = keyed_kernels.grad_input(dy, y, query, key, value, weights, bias, level)
    if not of_mixing:
        return inputs, sums, sums.new_empty(0)
    gradient = keyed_kernels.grad_lags if by_lag else keyed_kernels.grad_weight
    return inputs, sums, gradient(dy, query, key, value, level, context)


@torch.library.register_fake("mixer::keyed_conv_gradients")
def _(dy, y, query, key, value, bias, level, tiles, rest, falls, context, by_lag, of_mixing):
    batch, heads, tokens = level.shape
    channels = sum(x.shape[-1] for x in (query, key, value))
    inputs = query.new_empty((batch, tokens, channels))
    if not of_mixing:
        mixing_shape = (0,)
    elif by_lag:
        mixing_shape = (heads, 1, context)
    else:
        mixing_shape = (heads, 1, context, context)
    return inputs, torch.empty_like(level), level.new_empty(mixing_shape)


# ------------------------------------------------------------------------- their gradients


def _setup_context(ctx, inputs, output):
    query, key, value, mixing, bias, *weights = inputs
    y, level = output
    ctx.mark_non_differentiable(level)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, query, key, value, bias, level, *weights)
    ctx.context = mixing.shape[-1]
    ctx.dtype = mixing.dtype
    ctx.by_lag = mixing.dim() == 3


def _backward(ctx, dy, _):
    refuse_second_derivatives("keyed_conv")
    if dy is None:
        return (None,) * 8
    needs_mixing = ctx.needs_input_grad[3]
    dinputs, sums, dmixing = gradients(
        dy, *ctx.saved_tensors, ctx.context, ctx.by_lag, needs_mixing
    )
    _, query, key, value, *_ = ctx.saved_tensors
    channels = [query.shape[-1], key.shape[-1], value.shape[-1]]
    # Not dim=-1: the compiler leaves out the copy only where it sees its own 2 in both places.
    dquery, dkey, dvalue = dinputs.split(channels, dim=2)
    dmixing = dmixing.to(ctx.dtype) if needs_mixing else None
    # (batch, heads, tokens) -> (heads, context)
    dbias = F.pad(sums.sum(0), (0, ctx.context - sums.shape[-1]))
    return dquery, dkey, dvalue, dmixing, dbias.to(ctx.dtype), None, None, None


torch.library.register_autograd("mixer::keyed_conv", _backward, setup_context=_setup_context)
without_derivative("keyed_conv_gradients", "keyed_conv")
