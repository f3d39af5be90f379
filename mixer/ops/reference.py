"""The triangular convolution in plain PyTorch: `dense` (the masked-weight matmul) and `panels` (the triangle in row panels).

Both run on any device and dtype. `dense` is the reference that everything else is compared with. `panels` offers the same
four functions as the CUDA kernels (`mixer.ops.cuda`), so that one operator and one autograd formula serve both.

Shapes used throughout: x, y, residual (batch, tokens, channels); weight (heads, taps, context, context), out then in;
packed (heads, taps, tokens, columns); bias (heads, context).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixer.plain import dense, merge_heads, panel_bounds, products_per_triangle, shift_channels, split_heads, tap_shift

__all__ = ["dense", "products_per_triangle"]  # for those who know them by this module


def packed_columns(tokens: int) -> int:
    """Columns of a packed weight: `tokens` rounded up to 8, so that every row of a 16-bit weight starts on 16 bytes."""
    return (tokens + 7) // 8 * 8


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The lower triangle of the weight's top-left corner in `dtype`, zero elsewhere: (heads, taps, tokens, columns)."""
    corner = weight[..., :tokens, :tokens].tril().to(dtype)
    return F.pad(corner, (0, packed_columns(tokens) - tokens)).contiguous()


def forward(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y = bias + residual + W x; panel [start:end] of rows reads x[:end] alone."""
    heads, taps, tokens, _ = packed.shape
    parts = split_heads(x, heads)
    y = torch.zeros_like(parts, memory_format=torch.contiguous_format)  # (heads, batch, tokens, channels of a head)
    for tap in range(taps):
        shifted = shift_channels(parts, tap_shift(tap, taps))
        for start, end in panel_bounds(tokens):
            y[:, :, start:end] += packed[:, None, tap, start:end, :end] @ shifted[:, :, :end]
    if bias is not None:
        y += bias[:, None, :tokens, None].to(y.dtype)
    y = merge_heads(y).contiguous()
    return y if residual is None else y.add_(residual)


def grad_input(dy: Tensor, packed: Tensor) -> Tensor:
    """dx = W^T dy; panel [start:end] of rows reads dy[start:] alone."""
    heads, taps, tokens, _ = packed.shape
    parts = split_heads(dy, heads)
    dx = torch.zeros_like(parts, memory_format=torch.contiguous_format)
    for tap in range(taps):
        shifted = shift_channels(parts, -tap_shift(tap, taps))
        for start, end in panel_bounds(tokens):
            columns = packed[:, None, tap, start:, start:end].transpose(-1, -2)  # (heads, 1, end - start, tokens - start)
            dx[:, :, start:end] += columns @ shifted[:, :, start:]
    return merge_heads(dx).contiguous()


def grad_weight(
    dy: Tensor, x: Tensor, context: int, taps: int, heads: int, dtype: torch.dtype, with_bias: bool
) -> tuple[Tensor, Tensor]:
    """dW = tril(sum over batch of dy x^T) and dbias = sum over batch and channels of dy, zero beyond `tokens`.

    The batch is folded into the channels, so that the sum over it happens inside one product, in its accumulator.
    """
    tokens = x.shape[1]
    wide_dy = split_heads(dy, heads).transpose(1, 2).flatten(2)  # (heads, tokens, batch * channels of a head)
    dweight = dy.new_zeros((heads, taps, context, context), dtype=dtype)
    for tap in range(taps):
        shifted = shift_channels(split_heads(x, heads), tap_shift(tap, taps)).transpose(1, 2).flatten(2)
        for start, end in panel_bounds(tokens):
            rows = wide_dy[:, start:end] @ shifted[:, :end].transpose(-1, -2)  # (heads, end - start, end)
            dweight[:, tap, start:end, :end] = rows.tril(start)
    if not with_bias:
        return dweight, dy.new_empty(0, dtype=dtype)
    dbias = dy.new_zeros((heads, context), dtype=dtype)
    dbias[:, :tokens] = wide_dy.sum(-1, dtype=torch.promote_types(dtype, dy.dtype))
    return dweight, dbias
