"""Triton kernels of `mixer.ops.turn`, forward and backward, and how they are launched. In each head

    n = x / sqrt(mean of x ** 2 + EPSILON)
    y = gain * (n turned by the angles of its token)

The left half of a head's numbers is turned with the right half. All sums are float32 and have one
program, so results are the same bit for bit in each run.

This module is imported only where the kernels run: it needs Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixer.ops.keyed_kernels import dense_channels
from mixer.ops.plain import EPSILON

ROWS, WARPS = 64, 4  # tokens of one head in a program
SMALL: tl.constexpr = tl.constexpr(EPSILON)


@triton.jit
def place(x, x_text, x_row, tokens, all_tokens, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Of a program's ROWS tokens of one head: where the left halves are, (ROWS, SIZE / 2); the
    numbers of the tokens, all texts counted, (ROWS, 1); and which of them there are.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = x + row // tokens * x_text + row % tokens * x_row + head * SIZE
    return at + tl.arange(0, SIZE // 2)[None, :], row, row < all_tokens


@triton.jit
def normed(left, right, SIZE: tl.constexpr, NORM: tl.constexpr):
    """The halves, normed, and what they were multiplied by, (ROWS, 1)."""
    factor = tl.full((left.shape[0], 1), 1.0, tl.float32)
    if NORM:
        squares = tl.sum(left * left + right * right, 1)[:, None]
        factor = 1 / tl.sqrt(squares / SIZE + SMALL)
    return left * factor, right * factor, factor


@triton.jit
def angles(cos, sin, row, tokens, inside, SIZE: tl.constexpr, EACH: tl.constexpr):
    """Cosines and sines of the tokens, which texts share unless EACH has its own."""
    if not EACH:
        row = row % tokens
    at = row * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def gains(gain, SIZE: tl.constexpr, GAIN: tl.constexpr):
    c = tl.arange(0, SIZE // 2)[None, :]
    left, right = tl.full((1, SIZE // 2), 1.0, tl.float32), tl.full((1, SIZE // 2), 1.0, tl.float32)
    if GAIN:
        gain += tl.program_id(0) * SIZE
        left = tl.load(gain + c).to(tl.float32)
        right = tl.load(gain + SIZE // 2 + c).to(tl.float32)
    return left, right


@triton.jit
def forward_kernel(
    x, cos, sin, gain, y, x_text, x_row, tokens, all_tokens,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, EACH: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    at, row, inside = place(x, x_text, x_row, tokens, all_tokens, ROWS, SIZE)
    left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(at + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
    left, right, _ = normed(left, right, SIZE, NORM)
    if TURN:
        c, s = angles(cos, sin, row, tokens, inside, SIZE, EACH)
        left, right = left * c - right * s, right * c + left * s
    left_gain, right_gain = gains(gain, SIZE, GAIN)
    out = y + row * (HEADS * SIZE) + tl.program_id(0) * SIZE + tl.arange(0, SIZE // 2)[None, :]
    tl.store(out, (left * left_gain).to(y.dtype.element_ty), mask=inside)
    tl.store(out + SIZE // 2, (right * right_gain).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy, x, cos, sin, gain, dx, dgain, dy_text, dy_row, x_text, x_row, tokens, all_tokens,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, EACH: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and that of the gain over the ROWS tokens of each program, (blocks of
    tokens, HEADS * SIZE).
    """
    at, row, inside = place(x, x_text, x_row, tokens, all_tokens, ROWS, SIZE)
    left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(at + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
    at, _, _ = place(dy, dy_text, dy_row, tokens, all_tokens, ROWS, SIZE)
    dleft = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    dright = tl.load(at + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
    left, right, factor = normed(left, right, SIZE, NORM)
    if TURN:
        c, s = angles(cos, sin, row, tokens, inside, SIZE, EACH)
    if GAIN:
        turned_left, turned_right = left, right
        if TURN:
            turned_left, turned_right = left * c - right * s, right * c + left * s
        to = dgain + tl.program_id(1) * (HEADS * SIZE) + tl.program_id(0) * SIZE
        to += tl.arange(0, SIZE // 2)
        tl.store(to, tl.sum(dleft * turned_left, 0))
        tl.store(to + SIZE // 2, tl.sum(dright * turned_right, 0))
    left_gain, right_gain = gains(gain, SIZE, GAIN)
    dleft, dright = dleft * left_gain, dright * right_gain
    if TURN:
        dleft, dright = dleft * c + dright * s, dright * c - dleft * s
    if NORM:
        along = tl.sum(dleft * left + dright * right, 1)[:, None] / SIZE
        dleft, dright = (dleft - along * left) * factor, (dright - along * right) * factor
    out = dx + row * (HEADS * SIZE) + tl.program_id(0) * SIZE + tl.arange(0, SIZE // 2)[None, :]
    tl.store(out, dleft.to(dx.dtype.element_ty), mask=inside)
    tl.store(out + SIZE // 2, dright.to(dx.dtype.element_ty), mask=inside)


def forward(
    x: Tensor, heads: int, norm: bool, cos: Tensor | None, sin: Tensor | None, gain: Tensor | None
) -> Tensor:
    x = dense_channels(x)
    y = x.new_empty(x.shape)
    grid, sizes, options = launch(x, heads, norm, cos, gain)
    with torch.cuda.device_of(x):
        forward_kernel[grid](
            *(x, *pointers(x, cos, sin, gain), y, *x.stride()[:2], *sizes), **options
        )
    return y


def backward(
    dy: Tensor, x: Tensor, heads: int, norm: bool,
    cos: Tensor | None, sin: Tensor | None, gain: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x, and of the gain in float32."""
    x, dy = dense_channels(x), dense_channels(dy)
    dx = x.new_empty(x.shape)
    grid, sizes, options = launch(x, heads, norm, cos, gain)
    dgain = x.new_empty((grid[1] if gain is not None else 0, x.shape[-1]), dtype=torch.float32)
    with torch.cuda.device_of(x):
        backward_kernel[grid](
            *(dy, x, *pointers(x, cos, sin, gain), dx, dgain),
            *(*dy.stride()[:2], *x.stride()[:2], *sizes),
            **options,
        )
    return dx, dgain.sum(0)


def launch(x: Tensor, heads: int, norm: bool, cos: Tensor | None, gain: Tensor | None) -> tuple:
    """The grid, the numbers of tokens and what the kernels are compiled with."""
    batch, tokens, width = x.shape
    options = {"HEADS": heads, "SIZE": width // heads, "ROWS": ROWS, "NORM": norm}
    options |= {"TURN": cos is not None, "EACH": cos is not None and len(cos) > 1}
    options |= {"GAIN": gain is not None, "num_warps": WARPS}
    return (heads, triton.cdiv(batch * tokens, ROWS)), (tokens, batch * tokens), options


def pointers(x: Tensor, *others: Tensor | None) -> list[Tensor]:
    """What is missing is never read."""
    return [x if other is None else other.contiguous() for other in others]
