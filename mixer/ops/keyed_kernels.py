"""Triton kernels of keyed mixing and of its gradients, and how they are launched. In each head

    y[i] = bias[i] + sum over j <= i of w[i, j] * f[i, j] * v[j]
    f[i, j] = exp(s[i, j]) / mean over j <= i of exp(s[i, j]),   s[i, j] = scale * q[i] . k[j]

As in FlashAttention (arXiv 2205.14135), s is never in memory: each kernel computes the tiles of it
that it needs. level[i] is the logarithm of the mean, to base 2. Each number has one program that
adds it up, in the same order always, so results are the same bit for bit in each run.

q, k, v, y and their gradients are (batch, tokens, heads * size), the channels of a token side by
side; those of q, k and v are parts of one tensor. w is packed, (heads, tokens, tokens) in the type
of q, zero above the diagonal. Products are of that type, sums float32.

This module is imported only where the kernels run: it needs Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of each kernel: the rows i and columns j of a tile, warps, and loads that are under way at once,
# without spills and with at most the 99 KB of shared memory that every GPU from 8.0 on has. TILES,
# for keys and values of at most 128 numbers together, are the fastest of those tried with 32 and 64
# at 512 tokens on an H200 (dev/cuda/LOG.md). WIDE_TILES are for longer ones, and not tuned.
TILES = {
    "forward": (64, 64, 4, 3),
    "grad_query": (64, 32, 4, 3),
    "grad_key_value": (32, 64, 4, 3),
    "grad_weight": (64, 64, 4, 3),
}
WIDE_TILES = {
    "forward": (64, 32, 8, 3),
    "grad_query": (32, 64, 8, 2),
    "grad_key_value": (64, 32, 8, 2),
    "grad_weight": (32, 64, 4, 2),
}
FLOAT32_TILES = dict.fromkeys(TILES, (32, 32, 4, 1))
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


# ------------------------------------------------------------------------- pieces of the kernels


@triton.jit
def place():
    """Which tile, text and head a program has. Texts come first, as all of them read the same
    weights.
    """
    text, head = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    return tl.program_id(1), text, head


@triton.jit
def load_rows(base, stride, start, tokens, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Tokens start .. start + ROWS of one head, (ROWS, SIZE); zero beyond the last token."""
    rows = start + tl.arange(0, ROWS)
    at = base + rows[:, None].to(tl.int64) * stride + tl.arange(0, SIZE)[None, :]
    return tl.load(at, mask=rows[:, None] < tokens, other=0.0)


@triton.jit
def store_rows(base, stride, start, tokens, values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    rows = start + tl.arange(0, ROWS)
    at = base + rows[:, None].to(tl.int64) * stride + tl.arange(0, SIZE)[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=rows[:, None] < tokens)


@triton.jit
def load_vector(x, start, tokens, ROWS: tl.constexpr):
    rows = start + tl.arange(0, ROWS)
    return tl.load(x + rows, mask=rows < tokens, other=0.0)


@triton.jit
def load_weights(w, row, column, tokens, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of one head's weights, (ROWS, COLUMNS) float32."""
    i, j = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (i[:, None] < tokens) & (j[None, :] < tokens)
    return tl.load(w + i[:, None] * tokens + j[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def product(left, right, total=None):
    """left @ right, exact for float32 as well; added to `total`."""
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def logarithms(left, right, scale, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of s to base 2, (ROWS, COLUMNS), minus infinity where a key comes after its query."""
    i, j = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    s = product(left, tl.trans(right)) * (scale * LOG2_E)
    return tl.where(j[None, :] <= i[:, None], s, float("-inf"))


# ------------------------------------------------------------------------- the kernels


@triton.jit
def forward_kernel(
    q, k, v, w, bias, y, level,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, context, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program has ROWS tokens i of one head of one text."""
    tile, text, head = place()
    start = (tl.num_programs(1) - 1 - tile) * ROWS  # the longest sums begin first
    q += text * q_batch + head * KEYS
    k += text * k_batch + head * KEYS
    v += text * v_batch + head * VALUES
    y += text * tokens * HEADS * VALUES + head * VALUES
    level += (text * HEADS + head) * tokens
    w += head * tokens * tokens
    queries = load_rows(q, q_row, start, tokens, ROWS, KEYS)
    total = tl.zeros((ROWS, VALUES), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)  # the largest s so far, of which sums are
    for column in range(0, min(start + ROWS, tokens), COLUMNS):
        keys = load_rows(k, k_row, column, tokens, COLUMNS, KEYS)
        values = load_rows(v, v_row, column, tokens, COLUMNS, VALUES)
        s = logarithms(queries, keys, scale, start, column, ROWS, COLUMNS)
        higher = tl.maximum(top, tl.max(s, 1))
        shrink, top = tl.exp2(top - higher), higher
        e = tl.exp2(s - top[:, None])
        sums = sums * shrink + tl.sum(e, 1)
        p = e * load_weights(w, start, column, tokens, ROWS, COLUMNS)
        total = product(p.to(values.dtype), values, total * shrink[:, None])
    rows = start + tl.arange(0, ROWS)
    mean = sums / (rows + 1)
    tl.store(level + rows, top + tl.log2(mean), mask=rows < tokens)
    total /= mean[:, None]
    total += load_vector(bias + head * context, start, tokens, ROWS)[:, None]
    store_rows(y, HEADS * VALUES, start, tokens, total, ROWS, VALUES)


@triton.jit
def grad_query_kernel(
    q, k, v, w, dy, level, change, dqkv,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dq[i] = scale * sum over j of ds[i, j] k[j], where ds = f (w (dy[i] . v[j]) - change[i]).
    change[i], which is what the mean takes, is the mean over j of f w (dy[i] . v[j]): its part is
    added up by itself. A program has ROWS tokens i.
    """
    tile, text, head = place()
    start = (tl.num_programs(1) - 1 - tile) * ROWS
    q += text * q_batch + head * KEYS
    k += text * k_batch + head * KEYS
    v += text * v_batch + head * VALUES
    dy += text * tokens * HEADS * VALUES + head * VALUES
    vector = (text * HEADS + head) * tokens
    ALL: tl.constexpr = HEADS * (2 * KEYS + VALUES)
    dq = dqkv + text * tokens * ALL + head * KEYS
    w += head * tokens * tokens
    queries = load_rows(q, q_row, start, tokens, ROWS, KEYS)
    gradient = load_rows(dy, HEADS * VALUES, start, tokens, ROWS, VALUES)
    levels = load_vector(level + vector, start, tokens, ROWS)[:, None]
    total = tl.zeros((ROWS, KEYS), tl.float32)
    fitting = tl.zeros((ROWS, KEYS), tl.float32)  # the sum of f k
    changes = tl.zeros((ROWS,), tl.float32)
    for column in range(0, min(start + ROWS, tokens), COLUMNS):
        keys = load_rows(k, k_row, column, tokens, COLUMNS, KEYS)
        values = load_rows(v, v_row, column, tokens, COLUMNS, VALUES)
        f = tl.exp2(logarithms(queries, keys, scale, start, column, ROWS, COLUMNS) - levels)
        fitting = product(f.to(keys.dtype), keys, fitting)
        weights = load_weights(w, start, column, tokens, ROWS, COLUMNS)
        df = f * weights * product(gradient, tl.trans(values))
        total = product(df.to(keys.dtype), keys, total)
        changes += tl.sum(df, 1)
    rows = start + tl.arange(0, ROWS)
    changes /= rows + 1
    tl.store(change + vector + rows, changes, mask=rows < tokens)
    total -= changes[:, None] * fitting
    store_rows(dq, ALL, start, tokens, total * scale, ROWS, KEYS)


@triton.jit
def grad_key_value_kernel(
    q, k, v, wt, dy, level, change, dqkv,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dk[j] = scale * sum over i of ds[i, j] q[i], with ds as above; dv[j] = sum over i of w f
    dy[i]. A program has COLUMNS tokens j. Its tiles are transposed, (COLUMNS, ROWS), to be left
    factors, as wt is.
    """
    tile, text, head = place()
    column = tile * COLUMNS
    q += text * q_batch + head * KEYS
    k += text * k_batch + head * KEYS
    v += text * v_batch + head * VALUES
    dy += text * tokens * HEADS * VALUES + head * VALUES
    vector = (text * HEADS + head) * tokens
    ALL: tl.constexpr = HEADS * (2 * KEYS + VALUES)
    dk = dqkv + text * tokens * ALL + (HEADS + head) * KEYS
    dv = dqkv + text * tokens * ALL + 2 * HEADS * KEYS + head * VALUES
    wt += head * tokens * tokens
    keys = load_rows(k, k_row, column, tokens, COLUMNS, KEYS)
    values = load_rows(v, v_row, column, tokens, COLUMNS, VALUES)
    total_keys = tl.zeros((COLUMNS, KEYS), tl.float32)
    total_values = tl.zeros((COLUMNS, VALUES), tl.float32)
    j = column + tl.arange(0, COLUMNS)
    for start in range(column // ROWS * ROWS, tokens, ROWS):
        queries = load_rows(q, q_row, start, tokens, ROWS, KEYS)
        gradient = load_rows(dy, HEADS * VALUES, start, tokens, ROWS, VALUES)
        levels = load_vector(level + vector, start, tokens, ROWS)[None, :]
        changes = load_vector(change + vector, start, tokens, ROWS)[None, :]
        i = start + tl.arange(0, ROWS)
        s = product(keys, tl.trans(queries)) * (scale * LOG2_E)
        f = tl.where(j[:, None] <= i[None, :], tl.exp2(s - levels), 0.0)
        weights = load_weights(wt, column, start, tokens, COLUMNS, ROWS)
        total_values = product((f * weights).to(gradient.dtype), gradient, total_values)
        ds = f * (weights * product(values, tl.trans(gradient)) - changes)
        total_keys = product(ds.to(queries.dtype), queries, total_keys)
    store_rows(dk, ALL, column, tokens, total_keys * scale, COLUMNS, KEYS)
    store_rows(dv, ALL, column, tokens, total_values, COLUMNS, VALUES)


@triton.jit
def grad_weight_kernel(
    q, k, v, dy, level, dw,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, batch, context, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dw[i, j] = sum over the texts of f (dy[i] . v[j]), (heads, context, context) float32. A
    program has one tile of one head, and writes zeros above the diagonal and beyond the tokens.
    """
    start, column, head = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS, tl.program_id(2)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if (column < start + ROWS) & (start < tokens):
        q += head * KEYS
        k += head * KEYS
        v += head * VALUES
        dy += head * VALUES
        level += head * tokens
        for _ in range(batch):
            queries = load_rows(q, q_row, start, tokens, ROWS, KEYS)
            keys = load_rows(k, k_row, column, tokens, COLUMNS, KEYS)
            gradient = load_rows(dy, HEADS * VALUES, start, tokens, ROWS, VALUES)
            values = load_rows(v, v_row, column, tokens, COLUMNS, VALUES)
            levels = load_vector(level, start, tokens, ROWS)[:, None]
            s = logarithms(queries, keys, scale, start, column, ROWS, COLUMNS)
            total += tl.exp2(s - levels) * product(gradient, tl.trans(values))
            q += q_batch
            k += k_batch
            v += v_batch
            dy += tokens * HEADS * VALUES
            level += HEADS * tokens
    i, j = start + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    at = dw + head.to(tl.int64) * context * context + i[:, None] * context + j[None, :]
    tl.store(at, total, mask=(i[:, None] < context) & (j[None, :] < context))


# ------------------------------------------------------------------------- launches


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """(heads, 1, context, context) -> (heads, tokens, tokens), lower-triangular, in `dtype`."""
    return weight[:, 0, :tokens, :tokens].tril().to(dtype).contiguous()


def forward(
    query: Tensor, key: Tensor, value: Tensor, packed: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """y, (batch, tokens, heads * channels of a head), and level, (batch, heads, tokens) float32."""
    query, key, value = (dense_channels(x) for x in (query, key, value))
    heads, tokens, _ = packed.shape
    y = empty(value, value.shape)
    level = empty(value, (value.shape[0], heads, tokens), torch.float32)
    options = options_for("forward", query, value, heads)
    grid = (query.shape[0], triton.cdiv(tokens, options["ROWS"]), heads)
    with torch.cuda.device_of(query):
        forward_kernel[grid](
            *(query, key, value, packed, bias.contiguous(), y, level),
            *strides(query, key, value),
            *(bias.shape[1], tokens, scale_of(query, heads)),
            **options,
        )
    return y, level


def grad_input(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, packed: Tensor, level: Tensor
) -> Tensor:
    """The gradients of query, key and value side by side, (batch, tokens, channels of all)."""
    dy, query, key, value = dy.contiguous(), *(dense_channels(x) for x in (query, key, value))
    heads, tokens, _ = packed.shape
    channels = sum(x.shape[-1] for x in (query, key, value))
    dqkv = empty(query, (*query.shape[:2], channels))
    inputs = (query, key, value)
    change = empty(query, level.shape, torch.float32)
    others = (dy, level, change, dqkv, *strides(*inputs), tokens, scale_of(query, heads))
    with torch.cuda.device_of(query):
        options = options_for("grad_query", query, value, heads)
        grid = (query.shape[0], triton.cdiv(tokens, options["ROWS"]), heads)
        grad_query_kernel[grid](*inputs, packed, *others, **options)
        options = options_for("grad_key_value", query, value, heads)
        grid = (query.shape[0], triton.cdiv(tokens, options["COLUMNS"]), heads)
        turned = packed.transpose(1, 2).contiguous()
        grad_key_value_kernel[grid](*inputs, turned, *others, **options)
    return dqkv


def grad_weight(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, level: Tensor, context: int
) -> Tensor:
    """The gradient of the weight, (heads, 1, context, context) float32."""
    dy, query, key, value = dy.contiguous(), *(dense_channels(x) for x in (query, key, value))
    batch, tokens, _ = query.shape
    heads = level.shape[1]
    dw = empty(query, (heads, 1, context, context), torch.float32)
    options = options_for("grad_weight", query, value, heads)
    tiles = (triton.cdiv(context, options[edge]) for edge in ("ROWS", "COLUMNS"))
    grid = (*tiles, heads)
    with torch.cuda.device_of(query):
        grad_weight_kernel[grid](
            *(query, key, value, dy, level, dw),
            *strides(query, key, value),
            *(batch, context, tokens, scale_of(query, heads)),
            **options,
        )
    return dw


def options_for(kernel: str, query: Tensor, value: Tensor, heads: int) -> dict[str, int]:
    """What a kernel is compiled with."""
    keys, values = query.shape[-1] // heads, value.shape[-1] // heads
    rows, columns, warps, stages = tiles_for(query, keys, values)[kernel]
    sizes = {"HEADS": heads, "KEYS": keys, "VALUES": values, "ROWS": rows, "COLUMNS": columns}
    return sizes | {"num_warps": warps, "num_stages": stages}


def tiles_for(query: Tensor, keys: int, values: int) -> dict[str, tuple[int, int, int, int]]:
    """For keys and values of so many numbers."""
    if query.dtype == torch.float32:
        return FLOAT32_TILES
    if keys + values > 128:
        return WIDE_TILES
    return TILES


def scale_of(query: Tensor, heads: int) -> float:
    return (query.shape[-1] // heads) ** -0.5


def strides(*tensors: Tensor) -> list[int]:
    """How far apart texts, and tokens of a text, are."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def empty(like: Tensor, shape: tuple, dtype: torch.dtype | None = None) -> Tensor:
    """Where a kernel writes. All outputs come from here, so that tests can guard them."""
    return like.new_empty(shape, dtype=dtype)
