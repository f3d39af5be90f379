"""The functions of `mixer.ops.cuda` in plain PyTorch, on any device and type. Tests and benchmarks
put this module in the kernels' place where there is no GPU.
"""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from mixer.ops import plain, triangular
from mixer.ops.cuda import lag_zero, packed_shape, window_of
from mixer.ops.plain import (
    by_each_head,
    diagonal_sums,
    lags_at,
    merge_heads,
    split_heads,
    toeplitz,
)


@contextlib.contextmanager
def replacing_the_kernels() -> Iterator[None]:
    """Backend "cuda" runs these functions, on a CPU."""
    register()
    # What the compiler reads as constant, as the function in whose place it stands.
    take = torch.compiler.assume_constant_result(lambda backend, *_: backend == "cuda")
    with mock.patch.object(triangular, "_uses_kernels", take):
        yield


@functools.cache  # once in a process
def register() -> None:
    """Makes these functions the operators' kernels on a CPU."""
    implement = torch.library.impl
    implement("mixer::packed_conv", "CPU", packed_conv)
    # A test may replace these two.
    implement("mixer::packed_conv_grad_input", "CPU", lambda *rest: grad_input(*rest))
    implement("mixer::packed_conv_grad_weight", "CPU", lambda *rest: grad_weight(*rest))
    implement("mixer::short_conv", "CPU", short_conv)
    implement("mixer::short_conv_gradients", "CPU", short_conv_gradients)


def packed_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    packed = pack(weight, x.shape[1], x.dtype)
    return forward(x, packed, bias, residual, window_of(weight)), packed


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    window = window_of(weight)
    _, rows, columns = packed_shape(weight.shape[0], tokens, window)
    if not window:
        corner = weight[..., :tokens, :tokens].tril().to(dtype)
        return F.pad(corner, (0, columns - tokens)).contiguous()
    column = torch.arange(columns, device=weight.device)
    lag = column[:rows, None] + lag_zero(tokens, window) - column
    return lags_at(weight[:, :tokens], lag).to(dtype)


def square(packed: Tensor, tokens: int, window: int) -> Tensor:
    """The weight of the tokens, (heads, tokens, tokens)."""
    if not window:
        return packed[..., :tokens]
    first = lag_zero(tokens, window)
    lags = packed[:, 0, first - min(window, tokens) + 1 : first + 1].flip(-1)
    return toeplitz(F.pad(lags, (0, tokens - lags.shape[-1])), tokens)


def forward(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    window: int = 0,
) -> Tensor:
    tokens = x.shape[1]
    y = by_each_head(square(packed, tokens, window), split_heads(x, packed.shape[0]))
    if bias is not None:
        y = y + bias[:, None, :tokens, None].to(y.dtype)
    y = merge_heads(y)
    if residual is not None:
        y = y + residual
    return y.clone(memory_format=torch.contiguous_format)


def grad_input(dy: Tensor, packed: Tensor, window: int = 0) -> Tensor:
    weight = square(packed, dy.shape[1], window)
    dx = by_each_head(weight.mT, split_heads(dy, packed.shape[0]))
    return merge_heads(dx).clone(memory_format=torch.contiguous_format)


def grad_weight(
    dy: Tensor,
    x: Tensor,
    context: int,
    heads: int,
    with_bias: bool,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    missing = context - x.shape[1]
    gradient_dtype = torch.promote_types(x.dtype, torch.float32)
    x = split_heads(x, heads)  # (heads, batch, tokens, width)
    dy = split_heads(dy, heads)
    dweight = (dy @ x.mT).sum(1, dtype=gradient_dtype).tril()
    dbias = F.pad(dy.sum((1, 3), dtype=gradient_dtype), (0, missing))
    if window:
        dlags = diagonal_sums(dweight)[:, :window]
        dweight = F.pad(dlags, (0, window - dlags.shape[-1]))
    else:
        dweight = F.pad(dweight, (0, missing, 0, missing))
    return dweight, dbias if with_bias else dbias[0, :0].clone()


def short_conv(x: Tensor, lags: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return plain.triangular_conv(x, None, bias, residual, lags=lags[:, None])


def short_conv_gradients(
    dy: Tensor, x: Tensor, lags: Tensor, biases: int
) -> tuple[Tensor, Tensor, Tensor]:
    heads, window = lags.shape
    dx = grad_input(dy, pack(lags, dy.shape[1], dy.dtype), window)
    context = max(biases, x.shape[1])
    dlags, dbias = grad_weight(dy, x, context, heads, True, window)
    if biases == 1:
        dbias = dbias.sum(1, keepdim=True)
    return dx, dlags, dbias[:, :biases].clone()
