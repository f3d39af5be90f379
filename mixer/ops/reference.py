"""The triangular convolution in plain PyTorch: `dense` (the masked-weight matmul) and `panels` (the triangle in row panels).

Both run on any device and dtype. `dense` is the reference that everything else is compared with. `panels` offers the same
four functions as the CUDA kernels (`mixer.ops.cuda`), so that one operator and one autograd formula serve both.

Shapes used throughout: x, y, residual (batch, tokens, channels); weight (heads, taps, context, context), out then in;
packed (heads, taps, tokens, columns); bias (heads, context).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of a panel. p panels do (p + 1) / 2p of the dense product, but thin ones run at a lower rate: two panels, and from 1024
# tokens on panels of 512 rows, were the fastest on an H200 (benchmarks/results/token_mixing_h200.md).
MIN_PANEL_ROWS = 64
MAX_PANEL_ROWS = 512


def packed_columns(tokens: int) -> int:
    """Columns of a packed weight: `tokens` rounded up to 8, so that every row of a 16-bit weight starts on 16 bytes."""
    return (tokens + 7) // 8 * 8


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, channels) -> view (heads, batch, tokens, channels of a head)."""
    return x.unflatten(-1, (heads, -1)).permute(2, 0, 1, 3)


def merge_heads(x: Tensor) -> Tensor:
    """(heads, batch, tokens, channels of a head) -> contiguous (batch, tokens, channels)."""
    return x.permute(1, 2, 0, 3).flatten(2)


def shift_channels(x: Tensor, distance: int) -> Tensor:
    """out[..., c] = x[..., c + distance], zero where c + distance lies outside the head."""
    width = x.shape[-1]
    if distance == 0:
        return x
    if abs(distance) >= width:
        return torch.zeros_like(x)
    return F.pad(x[..., max(distance, 0) : width + min(distance, 0)], (max(-distance, 0), max(distance, 0)))


def tap_shift(tap: int, taps: int) -> int:
    """Channels by which tap `tap` looks to the right: nn.Conv1d(padding="same") puts (taps - 1) // 2 on the left."""
    return tap - (taps - 1) // 2


def dense(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """The masked-weight matmul, as one writes it in PyTorch: masked with tril, multiplied in full."""
    heads, taps = weight.shape[:2]
    tokens = x.shape[1]
    mask = weight[..., :tokens, :tokens].tril().to(x.dtype)  # (heads, taps, tokens, tokens)
    parts = split_heads(x, heads)  # (heads, batch, tokens, channels of a head)
    y = torch.matmul(mask[:, None, 0], shift_channels(parts, tap_shift(0, taps)))
    for tap in range(1, taps):
        y = y + torch.matmul(mask[:, None, tap], shift_channels(parts, tap_shift(tap, taps)))
    if bias is not None:
        y = y + bias[:, None, :tokens, None].to(y.dtype)
    y = merge_heads(y)
    return y if residual is None else y + residual


def panel_bounds(tokens: int) -> list[tuple[int, int]]:
    """Rows (start, end) of each panel. They start at multiples of 8, where a 16-bit weight lies on 16 bytes."""
    rows = min(max(packed_columns(-(-tokens // 2)), MIN_PANEL_ROWS), MAX_PANEL_ROWS)
    return [(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The lower triangle of the weight's top-left corner in `dtype`, zero elsewhere: (heads, taps, tokens, columns)."""
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
    if not x.is_cuda:  # where a product into rows of a larger tensor is slower than one that is copied there
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
                multiply_into(y[:, start:end, channels], packed[head, tap, start:end, :end], shifted[:, :end], tap > 0)
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
    """dW = tril(sum over batch of dy x^T) and dbias = sum over batch and channels of dy, zero beyond `tokens`.

    The products of the samples are in dy's dtype, as autograd has them; their sum is taken in `dtype` or fp32.
    """
    tokens = x.shape[1]
    sum_dtype = torch.promote_types(dtype, torch.float32)
    dweight = dy.new_zeros((heads, taps, context, context), dtype=dtype)
    dbias = dy.new_zeros((heads, context) if with_bias else (0,), dtype=dtype)
    for head, channels in enumerate(head_slices(x.shape[-1], heads)):
        for tap in range(taps):
            shifted = shift_channels(x[..., channels], tap_shift(tap, taps)).mT  # (batch, channels of a head, tokens)
            for start, end in panel_bounds(tokens):
                rows = torch.bmm(dy[:, start:end, channels], shifted[..., :end]).sum(0, dtype=sum_dtype)
                dweight[head, tap, start:end, :end] = rows.tril(start)
        if with_bias:
            dbias[head, :tokens] = dy[..., channels].sum((0, 2), dtype=sum_dtype)
    return dweight, dbias


def products_per_triangle(tokens: int, backend: str) -> int:
    """Pairs (i, j) that a backend multiplies for one triangle of `tokens` rows; tokens * (tokens + 1) / 2 are needed."""
    if backend == "dense":
        return tokens * tokens
    if backend == "panels":
        return sum((end - start) * end for start, end in panel_bounds(tokens))
    rows = 64  # the kernels skip the upper half in tiles of 64
    return sum((min(start + rows, tokens) - start) * min(start + rows, tokens) for start in range(0, tokens, rows))
