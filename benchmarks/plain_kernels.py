"""The functions of `mixer.ops.cuda` in plain PyTorch, on any device and type. Tests and benchmarks
put this module in the kernels' place where there is no GPU.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from mixer.ops import cuda, triangular
from mixer.ops.cuda import lag_zero, packed_shape
from mixer.ops.plain import by_each_head, diagonal_sums, lags_at, merge_heads, split_heads


@contextlib.contextmanager
def replacing_the_kernels() -> Iterator[None]:
    """Backend "cuda" runs these functions, on a CPU."""
    cuda.one_tap.register_kernel("cpu")(one_tap)
    cuda.grad_input.register_kernel("cpu")(lambda *arguments: grad_input(*arguments))
    cuda.grad_weight.register_kernel("cpu")(lambda *arguments: grad_weight(*arguments))
    # What the compiler reads as constant, as the function in whose place it stands.
    take = torch.compiler.assume_constant_result(lambda backend, *_: backend == "cuda")
    with mock.patch.object(triangular, "_kernels_take", take):
        yield


def one_tap(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    packed = pack(weight, x.shape[1], x.dtype)
    return forward(x, packed, bias, residual, weight.dim() == 2), packed


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    by_lag = weight.dim() == 2
    _, rows, columns = packed_shape(weight.shape[0], tokens, by_lag)
    if not by_lag:
        corner = weight[..., :tokens, :tokens].tril().to(dtype)
        return F.pad(corner, (0, columns - tokens)).contiguous()
    place = torch.arange(columns, device=weight.device)
    lags = F.pad(weight[:, :tokens], (0, columns + rows - tokens))
    return lags_at(lags, place[:rows, None] + lag_zero(tokens) - place).to(dtype)


def square(packed: Tensor, tokens: int, by_lag: bool) -> Tensor:
    """The weight of the tokens, (heads, tokens, tokens)."""
    if not by_lag:
        return packed[..., :tokens]
    place = torch.arange(tokens, device=packed.device)
    lag = (place[:, None] - place).clamp(min=0)
    return packed[:, 0][:, lag_zero(tokens) - lag].tril()


def forward(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    by_lag: bool = False,
) -> Tensor:
    tokens = x.shape[1]
    y = by_each_head(square(packed, tokens, by_lag), split_heads(x, packed.shape[0]))
    if bias is not None:
        y = y + bias[:, None, :tokens, None].to(y.dtype)
    y = merge_heads(y)
    return (y if residual is None else y + residual).clone(memory_format=torch.contiguous_format)


def grad_input(dy: Tensor, packed: Tensor, by_lag: bool = False) -> Tensor:
    weight = square(packed, dy.shape[1], by_lag)
    dx = by_each_head(weight.mT, split_heads(dy, packed.shape[0]))
    return merge_heads(dx).clone(memory_format=torch.contiguous_format)


def grad_weight(
    dy: Tensor,
    x: Tensor,
    context: int,
    heads: int,
    with_bias: bool,
    by_lag: bool = False,
) -> tuple[Tensor, Tensor]:
    missing = context - x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    dy, x = split_heads(dy, heads), split_heads(x, heads)  # (heads, batch, tokens, width)
    dweight = (dy @ x.mT).sum(1, dtype=wide).tril()
    dbias = F.pad(dy.sum((1, 3), dtype=wide), (0, missing))
    dweight = F.pad(dweight, (0, missing, 0, missing))
    dweight = diagonal_sums(dweight) if by_lag else dweight
    return dweight, dbias if with_bias else dbias[0, :0].clone()
