"""The triangular convolution in row panels, in plain PyTorch, on any device and dtype: a rival of
the kernels.

It offers the same four functions as the CUDA kernels (`mixer.ops.cuda`), so that tests can put it
in their place.

Shapes used throughout: x, y, residual (batch, tokens, channels); weight (heads, taps, context,
context), out then in; packed (heads, taps, tokens, columns); bias (heads, context).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixer.ops.cuda import packed_columns
from mixer.ops.plain import panel_bounds, shift_channels, tap_shift


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The lower triangle of the weight's top-left corner in `dtype`, zero elsewhere: (heads, taps,
    tokens, columns).
    """
    corner = weight[..., :tokens, :tokens].tril().to(dtype)
    return F.pad(corner, (0, packed_columns(tokens) - tokens)).contiguous()


def head_slices(channels: int, heads: int) -> list[slice]:
    """The channels of each head."""
    width = channels // heads
    return [slice(head * width, (head + 1) * width) for head in range(heads)]


def multiply_into(out: Tensor, weight: Tensor, x: Tensor, add: bool) -> None:
    """out = weight @ x, or += if `add`.

    out (batch, rows, channels), weight (rows, depth), x (batch, depth, channels).
    """
    if not x.is_cuda:
        # There a product into rows of a larger tensor is slower than a product and a copy.
        product = weight @ x
        out.add_(product) if add else out.copy_(product)
    elif add:
        out.baddbmm_(weight.expand(x.shape[0], -1, -1), x)
    else:
        torch.bmm(weight.expand(x.shape[0], -1, -1), x, out=out)


def forward(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y = bias + residual + W x; panel [start:end] of rows reads x[:end] alone."""
    heads, taps, tokens, _ = packed.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for head, channels in enumerate(head_slices(x.shape[-1], heads)):
        for tap in range(taps):
            shifted = shift_channels(x[..., channels], tap_shift(tap, taps))
            for start, end in panel_bounds(tokens):
                multiply_into(
                    y[:, start:end, channels],
                    packed[head, tap, start:end, :end],
                    shifted[:, :end],
                    tap > 0,
                )
        if bias is not None:
            y[..., channels] += bias[head, :tokens, None].to(y.dtype)
    return y if residual is None else y.add_(residual)


def grad_input(dy: Tensor, packed: Tensor) -> Tensor:
    """dx = W^T dy; panel [start:end] of rows reads dy[start:] alone."""
    heads, taps, tokens, _ = packed.shape
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    for head, channels in enumerate(head_slices(dy.shape[-1], heads)):
        for tap in range(taps):
            shifted = shift_channels(dy[..., channels], -tap_shift(tap, taps))
            for start, end in panel_bounds(tokens):
                columns = packed[head, tap, start:, start:end].t()  # (end - start, tokens - start)
                multiply_into(dx[:, start:end, channels], columns, shifted[:, start:], tap > 0)
    return dx


def grad_weight(
    dy: Tensor, x: Tensor, context: int, taps: int, heads: int, dtype: torch.dtype, with_bias: bool
) -> tuple[Tensor, Tensor]:
    """dW = tril(sum over batch of dy x^T) and dbias = sum over batch and channels of dy, zero
    beyond `tokens`.

    The products of the samples are in dy's dtype, as autograd has them; their sum is taken in
    `dtype` or fp32.
    """
    tokens = x.shape[1]
    sum_dtype = torch.promote_types(dtype, torch.float32)
    dweight = dy.new_zeros((heads, taps, context, context), dtype=dtype)
    dbias = dy.new_zeros((heads, context) if with_bias else (0,), dtype=dtype)
    for head, channels in enumerate(head_slices(x.shape[-1], heads)):
        for tap in range(taps):
            # (batch, channels of a head, tokens)
            shifted = shift_channels(x[..., channels], tap_shift(tap, taps)).mT
            for start, end in panel_bounds(tokens):
                products = torch.bmm(dy[:, start:end, channels], shifted[..., :end])
                rows = products.sum(0, dtype=sum_dtype)
                dweight[head, tap, start:end, :end] = rows.tril(start)
        if with_bias:
            dbias[head, :tokens] = dy[..., channels].sum((0, 2), dtype=sum_dtype)
    return dweight, dbias
