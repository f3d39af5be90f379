"""Triton kernels of keyed mixing and of its gradients, and how they are launched. `keyed_conv` in
keyed.py defines y, f and s, of q, k, v and w.

As in FlashAttention (arXiv 2205.14135), s is never in memory: each kernel computes the tiles of it
that it needs. level[i] is the logarithm of the mean, to base 2. Each number has one program that
adds it up, always in the same order, so results are the same bit for bit in each run.

q, k, v, y and their gradients are (batch, tokens, heads * size), the channels of a token side by
side. q, k and v may be parts of one tensor; their gradients always are. Products have the type of
q, sums are float32. The weights w have one of two forms (`Weights`): a packed triangle, or strips,
from which a tile of a weight by lag is read.

This module is imported only where the kernels run: it needs Triton.
"""
# Triton compiles the kernels: what it fills in, and branches that it leaves out, are unlike Python.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixer.ops.strips import AROUND, LARGEST_TILE, SHIFTS, Weights

# Of each kernel: the rows i and columns j of a tile, warps, loads that are under way at once, and
# registers of a thread (None: as many as the compiler takes), with at most the 99 KB of shared
# memory that every GPU from 8.0 on has. TILES are for keys and values of at most 128 numbers
# together, WIDE_TILES for longer ones, and not tuned (dev/cuda/LOG.md).
TILES = {
    "forward": (64, 64, 4, 3, 168),
    "grad_query": (64, 32, 4, 3, None),
    "grad_key_value": (32, 64, 4, 3, None),
    "grad_weight": (64, 64, 4, 3, None),
    "grad_lags": (128, 64, 8, 2, None),
}
WIDE_TILES = {
    "forward": (64, 32, 8, 3, None),
    "grad_query": (32, 64, 8, 2, None),
    "grad_key_value": (64, 32, 8, 2, None),
    "grad_weight": (32, 64, 4, 2, None),
    "grad_lags": (64, 32, 8, 2, None),
}
FLOAT32_TILES = dict.fromkeys(TILES, (32, 32, 4, 1, None))
ENOUGH_PROGRAMS = 2048  # to fill a GPU evenly; with fewer diagonals and heads, several share texts
LAGS_AT_ONCE = 64  # of which a program adds up the gradient
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
PIVOT: tl.constexpr = tl.constexpr(LARGEST_TILE)
SHIFTED: tl.constexpr = tl.constexpr(SHIFTS)


# ------------------------------------------------------------------------- pieces of the kernels


@triton.jit
def program_ids():
    """A program's tile, text and head. Texts come first, as all of them read the same weights."""
    text = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    return tile, text, head


@triton.jit
def rows_at(base, stride, start, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Where tokens start .. start + ROWS of one head are."""
    base += tl.cast(stride, tl.int64) * start
    return base + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, SIZE)[None, :]


@triton.jit
def load(at, inside, WHOLE: tl.constexpr):
    """Zero where not `inside`. Where all tiles are WHOLE, nothing lies beyond the last token."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store(at, values, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=inside)


@triton.jit
def load_rows(
    base, stride, start, tokens, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Tokens start .. start + ROWS of one head, (ROWS, SIZE)."""
    at = rows_at(base, stride, start, ROWS, SIZE)
    return load(at, start + tl.arange(0, ROWS)[:, None] < tokens, WHOLE)


@triton.jit
def store_rows(
    base, stride, start, tokens, values, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    at = rows_at(base, stride, start, ROWS, SIZE)
    values = values.to(base.dtype.element_ty)
    store(at, values, start + tl.arange(0, ROWS)[:, None] < tokens, WHOLE)


@triton.jit
def load_vector(x, start, tokens, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    rows = start + tl.arange(0, ROWS)
    return load(x + rows, rows < tokens, WHOLE)


@triton.jit
def store_vector(x, start, tokens, values, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    rows = start + tl.arange(0, ROWS)
    store(x + rows, values, rows < tokens, WHOLE)


@triton.jit
def load_weights(
    w, row, column, tokens, length, origin,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, BY_LAG: tl.constexpr,
):  # fmt: skip
    """A tile of one head's packed weights, or of the part of them that a strip holds: (ROWS,
    COLUMNS) float32. Of transposed weights, and of the second strip, row is a j and column an i.
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    if BY_LAG:
        # Row r's vector is shifted by what r lacks to the end of its group of SHIFTED rows.
        group_start = r // SHIFTED * SHIFTED
        shift = group_start + (SHIFTED - 1) - r
        along = (origin + column - row) - group_start
        at = w + (shift * length)[:, None] + along[:, None] + c[None, :]
        return tl.load(at).to(tl.float32)
    i = row + r
    j = column + c
    at = w + i[:, None] * tokens + j[None, :]
    inside = (i[:, None] < tokens) & (j[None, :] < tokens)
    return load(at, inside, WHOLE).to(tl.float32)


@triton.jit
def risen(fall, distance):
    """2 ** (fall * distance), cut off so that a product of two does not overflow: there the query's
    number makes the product nothing beside 1.
    """
    return tl.exp2(tl.minimum(fall * distance, 60.0))


@triton.jit
def pivot_of(start):
    return start // PIVOT * PIVOT


@triton.jit
def product(left, right, total=None):
    """left @ right, exact for float32 as well; added to `total`.

    A loop's last product must not be added to by `total` alone: on Hopper it would still run while
    the next turn begins, and ptxas would then let no two products run at once. So it is scaled.
    """
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def with_earlier(x, start, column, fill, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile x (ROWS, COLUMNS) with `fill` where a key comes after its query."""
    if column + COLUMNS > start + 1:
        i = start + tl.arange(0, ROWS)
        j = column + tl.arange(0, COLUMNS)
        x = tl.where(j[None, :] <= i[:, None], x, fill)
    return x


# ------------------------------------------------------------------------- the kernels


@triton.jit
def forward_kernel(
    q, k, v, w, rest, falls, bias, y, level,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, w_head, length, origin, context, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BY_LAG: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A program has ROWS tokens i of one head of one text."""
    tile, text, head = program_ids()
    start = (tl.num_programs(1) - 1 - tile) * ROWS  # the longest sums begin first
    q += text * q_batch + head * KEYS
    k += text * k_batch + head * KEYS
    v += text * v_batch + head * VALUES
    y += text * tokens * HEADS * VALUES + head * VALUES
    level += (text * HEADS + head) * tokens
    w += head * w_head
    scale *= LOG2_E
    queries = load_rows(q, q_row, start, tokens, ROWS, KEYS, WHOLE)
    if BY_LAG:
        fall = tl.load(falls + head)
        row_factor = load_vector(rest + head * tokens, start, tokens, ROWS, WHOLE)
        column_factor = risen(fall, tl.arange(0, COLUMNS))
    total = tl.zeros((ROWS, VALUES), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)  # the largest s so far, of which sums are
    for column in range(0, min(start + ROWS, tokens), COLUMNS):
        keys = load_rows(k, k_row, column, tokens, COLUMNS, KEYS, WHOLE)
        values = load_rows(v, v_row, column, tokens, COLUMNS, VALUES, WHOLE)
        s = product(queries, tl.trans(keys))
        s = with_earlier(s, start, column, float("-inf"), ROWS, COLUMNS)
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        shrink = tl.exp2(top - higher)
        top = higher
        e = tl.exp2(s * scale - top[:, None])
        sums = sums * shrink + tl.sum(e, 1)
        weights = load_weights(
            w, start, column, tokens, length, origin, ROWS, COLUMNS, WHOLE, BY_LAG
        )
        if BY_LAG:
            factor = row_factor * risen(fall, column - pivot_of(start))
            weights += factor[:, None] * column_factor[None, :]
        total = product((e * weights).to(values.dtype), values, total * shrink[:, None])
    mean = sums / (start + tl.arange(0, ROWS) + 1)
    store_vector(level, start, tokens, top + tl.log2(mean), ROWS, WHOLE)
    total /= mean[:, None]
    total += load_vector(bias + head * context, start, tokens, ROWS, WHOLE)[:, None]
    store_rows(y, HEADS * VALUES, start, tokens, total, ROWS, VALUES, WHOLE)


@triton.jit
def grad_query_kernel(
    q, k, v, w, rest, falls, bias, y, dy, level, change, sums, dqkv,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, w_head, length, origin, context, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BY_LAG: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dq[i] = scale * sum over j of ds[i, j] k[j], where ds = f (w (dy[i] . v[j]) - change[i]).
    change[i], which is what the mean takes, is the mean over j of f w (dy[i] . v[j]). That sum is
    dy[i] . (y[i] - bias[i]), so it needs no loop of its own. But y is rounded, and the first query,
    whose only f is 1, has no ds at all. A program has ROWS tokens i, and adds up dy as well.
    """
    tile, text, head = program_ids()
    start = (tl.num_programs(1) - 1 - tile) * ROWS
    q += text * q_batch + head * KEYS
    k += text * k_batch + head * KEYS
    v += text * v_batch + head * VALUES
    y += text * tokens * HEADS * VALUES + head * VALUES
    dy += text * tokens * HEADS * VALUES + head * VALUES
    vector = (text * HEADS + head) * tokens
    w += head * w_head
    queries = load_rows(q, q_row, start, tokens, ROWS, KEYS, WHOLE)
    gradient = load_rows(dy, HEADS * VALUES, start, tokens, ROWS, VALUES, WHOLE)
    levels = load_vector(level + vector, start, tokens, ROWS, WHOLE)
    result = load_rows(y, HEADS * VALUES, start, tokens, ROWS, VALUES, WHOLE).to(tl.float32)
    biases = load_vector(bias + head * context, start, tokens, ROWS, WHOLE)
    added = tl.sum(gradient.to(tl.float32), 1)
    changes = tl.sum(gradient.to(tl.float32) * result, 1) - biases * added
    changes /= start + tl.arange(0, ROWS) + 1
    store_vector(change + vector, start, tokens, changes, ROWS, WHOLE)
    store_vector(sums + vector, start, tokens, added, ROWS, WHOLE)
    if BY_LAG:
        fall = tl.load(falls + head)
        row_factor = load_vector(rest + head * tokens, start, tokens, ROWS, WHOLE)
        column_factor = risen(fall, tl.arange(0, COLUMNS))
    total = tl.zeros((ROWS, KEYS), tl.float32)
    for column in range(0, min(start + ROWS, tokens), COLUMNS):
        keys = load_rows(k, k_row, column, tokens, COLUMNS, KEYS, WHOLE)
        values = load_rows(v, v_row, column, tokens, COLUMNS, VALUES, WHOLE)
        weights = load_weights(
            w, start, column, tokens, length, origin, ROWS, COLUMNS, WHOLE, BY_LAG
        )
        if BY_LAG:
            factor = row_factor * risen(fall, column - pivot_of(start))
            weights += factor[:, None] * column_factor[None, :]
        s = product(queries, tl.trans(keys))
        f = tl.exp2(s * (scale * LOG2_E) - levels[:, None])
        f = with_earlier(f, start, column, 0.0, ROWS, COLUMNS)
        ds = f * (weights * product(gradient, tl.trans(values)) - changes[:, None])
        if start == 0:
            ds = tl.where(tl.arange(0, ROWS)[:, None] > 0, ds, 0.0)
        total += product(ds.to(keys.dtype), keys) * scale
    ALL: tl.constexpr = HEADS * (2 * KEYS + VALUES)
    base = dqkv + text * tokens * ALL + head * KEYS
    store_rows(base, ALL, start, tokens, total, ROWS, KEYS, WHOLE)


@triton.jit
def grad_key_value_kernel(
    q, k, v, w, rest, falls, dy, level, change, dqkv,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, w_head, length, origin, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BY_LAG: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dk[j] = scale * sum over i of ds[i, j] q[i], with ds as above; dv[j] = sum over i of w f
    dy[i]. A program has COLUMNS tokens j. Its tiles are transposed, (COLUMNS, ROWS), to be left
    factors, as w is.
    """
    tile, text, head = program_ids()
    column = tile * COLUMNS
    q += text * q_batch + head * KEYS
    k += text * k_batch + head * KEYS
    v += text * v_batch + head * VALUES
    dy += text * tokens * HEADS * VALUES + head * VALUES
    vector = (text * HEADS + head) * tokens
    w += head * w_head
    keys = load_rows(k, k_row, column, tokens, COLUMNS, KEYS, WHOLE)
    values = load_rows(v, v_row, column, tokens, COLUMNS, VALUES, WHOLE)
    total_keys = tl.zeros((COLUMNS, KEYS), tl.float32)
    total_values = tl.zeros((COLUMNS, VALUES), tl.float32)
    j = column + tl.arange(0, COLUMNS)
    if BY_LAG:
        fall = tl.load(falls + head)
    for start in range(column // ROWS * ROWS, tokens, ROWS):
        queries = load_rows(q, q_row, start, tokens, ROWS, KEYS, WHOLE)
        gradient = load_rows(dy, HEADS * VALUES, start, tokens, ROWS, VALUES, WHOLE)
        levels = load_vector(level + vector, start, tokens, ROWS, WHOLE)[None, :]
        changes = load_vector(change + vector, start, tokens, ROWS, WHOLE)[None, :]
        s = product(keys, tl.trans(queries))
        f = tl.exp2(s * (scale * LOG2_E) - levels)
        i = start + tl.arange(0, ROWS)
        if column + COLUMNS > start + 1:
            f = tl.where(j[:, None] <= i[None, :], f, 0.0)
        weights = load_weights(
            w, column, start, tokens, length, origin, COLUMNS, ROWS, WHOLE, BY_LAG
        )
        if BY_LAG:
            row_factor = load_vector(rest + head * tokens, start, tokens, ROWS, WHOLE)
            weights += risen(fall, j - pivot_of(start))[:, None] * row_factor[None, :]
        total_values = product((f * weights).to(gradient.dtype), gradient, total_values)
        ds = f * (weights * product(values, tl.trans(gradient)) - changes)
        if start == 0:
            ds = tl.where(i[None, :] > 0, ds, 0.0)
        total_keys += product(ds.to(queries.dtype), queries) * scale
    ALL: tl.constexpr = HEADS * (2 * KEYS + VALUES)
    base = dqkv + text * tokens * ALL + (HEADS + head) * KEYS
    store_rows(base, ALL, column, tokens, total_keys, COLUMNS, KEYS, WHOLE)
    base = dqkv + text * tokens * ALL + 2 * HEADS * KEYS + head * VALUES
    store_rows(base, ALL, column, tokens, total_values, COLUMNS, VALUES, WHOLE)


@triton.jit
def tile_of_gradient(
    q, k, v, dy, level, q_row, k_row, v_row, start, column, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """f (dy[i] . v[j]) of one text and head, (ROWS, COLUMNS): its part in the weight's gradient.
    What it has above the diagonal is without meaning.
    """
    queries = load_rows(q, q_row, start, tokens, ROWS, KEYS, WHOLE)
    keys = load_rows(k, k_row, column, tokens, COLUMNS, KEYS, WHOLE)
    gradient = load_rows(dy, HEADS * VALUES, start, tokens, ROWS, VALUES, WHOLE)
    values = load_rows(v, v_row, column, tokens, COLUMNS, VALUES, WHOLE)
    levels = load_vector(level, start, tokens, ROWS, WHOLE)[:, None]
    s = product(queries, tl.trans(keys)) * (scale * LOG2_E)
    return tl.exp2(s - levels) * product(gradient, tl.trans(values))


@triton.jit(do_not_specialize=["batch"])
def grad_weight_kernel(
    q, k, v, dy, level, dw,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, batch, context, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dw[i, j] = sum over the texts of f (dy[i] . v[j]), (heads, context, context) float32. A
    program has one tile of one head, and writes zeros above the diagonal and beyond the tokens.
    """
    start = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS
    head = tl.program_id(2)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if (column < start + ROWS) & (start < tokens):
        q += head * KEYS
        k += head * KEYS
        v += head * VALUES
        dy += head * VALUES
        level += head * tokens
        for _ in range(batch):
            total += tile_of_gradient(
                q, k, v, dy, level, q_row, k_row, v_row, start, column, tokens, scale,
                HEADS, KEYS, VALUES, ROWS, COLUMNS, WHOLE,
            )  # fmt: skip
            q += q_batch
            k += k_batch
            v += v_batch
            dy += tokens * HEADS * VALUES
            level += HEADS * tokens
        total = with_earlier(total, start, column, 0.0, ROWS, COLUMNS)
    i = start + tl.arange(0, ROWS)
    j = column + tl.arange(0, COLUMNS)
    at = dw + head.to(tl.int64) * context * context + i[:, None] * context + j[None, :]
    tl.store(at, total, mask=(i[:, None] < context) & (j[None, :] < context))


@triton.jit(do_not_specialize=["batch"])
def grad_lags_kernel(
    q, k, v, dy, level, partial,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, batch, tokens, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The same gradient added up over the tiles of one block diagonal, which have equal weights,
    and over every so many texts, (shares of texts, heads, diagonals, COLUMNS, ROWS) float32.
    """
    diagonal, share, head = program_ids()
    shares = tl.num_programs(0)
    apart = diagonal * COLUMNS - (ROWS - COLUMNS)  # from column to start, in all of its tiles
    first = tl.cdiv(tl.maximum(apart, 0), ROWS) * ROWS
    # A tile beyond the last column has no keys.
    tiles = tl.cdiv(tl.minimum(tokens, tokens + apart) - first, ROWS)
    q += head * KEYS
    k += head * KEYS
    v += head * VALUES
    dy += head * VALUES
    level += head * tokens
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(batch - share, shares).to(tl.int32) * tiles):
        text = share + step // tiles * shares
        start = first + step % tiles * ROWS
        total += tile_of_gradient(
            q + text * q_batch, k + text * k_batch, v + text * v_batch,
            dy + text * tokens * HEADS * VALUES, level + text * HEADS * tokens,
            q_row, k_row, v_row, start, start - apart, tokens, scale,
            HEADS, KEYS, VALUES, ROWS, COLUMNS, WHOLE,
        )  # fmt: skip
    tile = (share * HEADS + head) * tl.num_programs(1) + diagonal
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    tl.store(partial + tile * ROWS * COLUMNS + c[None, :] * ROWS + r[:, None], total)


@triton.jit
def along_diagonals_kernel(
    partial, dlags, diagonals, context,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LAGS: tl.constexpr,
):  # fmt: skip
    """Adds up these tiles along their diagonals: dlags is (shares, heads, context). A program has
    LAGS lags of one share and head.
    """
    block, share, head = program_ids()
    lag = block * LAGS + tl.arange(0, LAGS)
    total = tl.zeros((LAGS,), tl.float32)
    partial += (share * HEADS + head) * diagonals * ROWS * COLUMNS
    # Lag l is r - c + apart in a tile, and 0 <= r < ROWS.
    lowest = tl.maximum(block * LAGS // COLUMNS - 1, 0)
    highest = tl.minimum((block * LAGS + LAGS + ROWS) // COLUMNS + 1, diagonals)
    for diagonal in range(lowest, highest):
        c = tl.arange(0, COLUMNS)[:, None]
        r = lag[None, :] - (diagonal * COLUMNS - (ROWS - COLUMNS)) + c
        at = partial + diagonal * ROWS * COLUMNS + c * ROWS + r
        total += tl.sum(tl.load(at, mask=(r >= 0) & (r < ROWS), other=0.0), 0)
    tl.store(dlags + (share * HEADS + head) * context + lag, total, mask=lag < context)


# ------------------------------------------------------------------------- launches


def forward(
    query: Tensor, key: Tensor, value: Tensor, weights: Weights, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """y, (batch, tokens, heads * channels of a head), and level, (batch, heads, tokens) float32."""
    inputs, strides = dense(query, key, value)
    batch, tokens, _ = query.shape
    heads = len(bias)
    y = empty(value, value.shape)
    level = empty(value, (batch, heads, tokens), torch.float32)
    options = options_for("forward", query, value, heads)
    grid = (batch, triton.cdiv(tokens, options["ROWS"]), heads)
    with torch.cuda.device_of(query):
        forward_kernel[grid](
            *inputs, *pointers(weights), contiguous(bias), y, level,
            *strides, *layout(weights), bias.shape[1], tokens, options["KEYS"] ** -0.5,
            BY_LAG=weights.rest is not None, **options,
        )  # fmt: skip
    return y, level


def grad_input(
    dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Weights,
    bias: Tensor, level: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value side by side, (batch, tokens, channels of all), and dy
    summed over the channels of a head, (batch, heads, tokens) float32.
    """
    inputs, strides = dense(query, key, value)
    batch, tokens, _ = query.shape
    heads = len(bias)
    dy = contiguous(dy)
    dqkv = empty(query, (batch, tokens, sum(x.shape[-1] for x in inputs)))
    change = empty(query, level.shape, torch.float32)
    sums = empty(query, level.shape, torch.float32)
    by_lag = weights.rest is not None
    scale = (query.shape[-1] // heads) ** -0.5
    with torch.cuda.device_of(query):
        options = options_for("grad_query", query, value, heads)
        grid = (batch, triton.cdiv(tokens, options["ROWS"]), heads)
        grad_query_kernel[grid](
            *inputs, *pointers(weights), contiguous(bias), y, dy, level, change, sums, dqkv,
            *strides, *layout(weights), bias.shape[1], tokens, scale,
            BY_LAG=by_lag, **options,
        )  # fmt: skip
        options = options_for("grad_key_value", query, value, heads)
        grid = (batch, triton.cdiv(tokens, options["COLUMNS"]), heads)
        grad_key_value_kernel[grid](
            *inputs, *pointers(weights, turned=True), dy, level, change, dqkv,
            *strides, *layout(weights, turned=True), tokens, scale,
            BY_LAG=by_lag, **options,
        )  # fmt: skip
    return dqkv, sums


def grad_weight(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, level: Tensor, context: int
) -> Tensor:
    """The gradient of the weight, (heads, 1, context, context) float32."""
    inputs, strides = dense(query, key, value)
    batch, heads, tokens = level.shape
    dw = empty(query, (heads, 1, context, context), torch.float32)
    options = options_for("grad_weight", query, value, heads)
    rows = triton.cdiv(context, options["ROWS"])
    columns = triton.cdiv(context, options["COLUMNS"])
    with torch.cuda.device_of(query):
        grad_weight_kernel[rows, columns, heads](
            *inputs, contiguous(dy), level, dw,
            *strides, batch, context, tokens, options["KEYS"] ** -0.5, **options,
        )  # fmt: skip
    return dw


def grad_lags(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, level: Tensor, context: int
) -> Tensor:
    """The gradient of the weights by lag, (heads, 1, context) float32."""
    inputs, strides = dense(query, key, value)
    batch, heads, tokens = level.shape
    options = options_for("grad_lags", query, value, heads)
    rows = options["ROWS"]
    columns = options["COLUMNS"]
    # The last has the tile of the last row and the first column.
    diagonals = (triton.cdiv(tokens, rows) * rows - columns) // columns + 1
    shares = min(triton.cdiv(ENOUGH_PROGRAMS, diagonals * heads), batch)
    partial = empty(query, (shares, heads, diagonals, columns, rows), torch.float32)
    dlags = empty(query, (shares, heads, context), torch.float32)
    with torch.cuda.device_of(query):
        grad_lags_kernel[shares, diagonals, heads](
            *inputs, contiguous(dy), level, partial,
            *strides, batch, tokens, options["KEYS"] ** -0.5, **options,
        )  # fmt: skip
        along_diagonals_kernel[shares, triton.cdiv(context, LAGS_AT_ONCE), heads](
            partial, dlags, diagonals, context,
            HEADS=heads, ROWS=rows, COLUMNS=columns, LAGS=LAGS_AT_ONCE,
        )  # fmt: skip
    return dlags.sum(0)[:, None]


def dense(*tensors: Tensor) -> tuple[list[Tensor], list[int]]:
    """The tensors as kernels can read them, and how far apart their texts, and the tokens of a
    text, are.
    """
    readable = []
    strides = []
    for x in tensors:
        if not is_even(x):
            x = x.clone(memory_format=torch.contiguous_format)
        readable.append(x)
        strides += x.stride()[:2]
    return readable, strides


def is_even(x: Tensor) -> bool:
    """Whether x begins at a multiple of 16 bytes, and texts and tokens stand multiples of 16
    numbers apart. Triton compiles kernels anew for what does not, and some of these give wrong
    numbers (Triton 3.6, H200, with loads ahead of their use).
    """
    text_stride, token_stride, channel_stride = x.stride()
    return (
        channel_stride == 1
        and text_stride % 16 == 0
        and token_stride % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def contiguous(x: Tensor) -> Tensor:
    """x, or a copy, without gaps from a multiple of 16 bytes on, as `is_even`."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def options_for(kernel: str, query: Tensor, value: Tensor, heads: int) -> dict[str, int]:
    """What a kernel is compiled with."""
    keys = query.shape[-1] // heads
    values = value.shape[-1] // heads
    rows, columns, warps, stages, registers = tiles_for(query, keys, values)[kernel]
    return {
        "HEADS": heads,
        "KEYS": keys,
        "VALUES": values,
        "ROWS": rows,
        "COLUMNS": columns,
        "WHOLE": query.shape[1] % max(rows, columns) == 0,
        "num_warps": warps,
        "num_stages": stages,
        "maxnreg": registers,
    }


def tiles_for(query: Tensor, keys: int, values: int) -> dict[str, tuple]:
    """For keys and values of so many numbers."""
    if query.dtype == torch.float32:
        return FLOAT32_TILES
    if keys + values > 128:
        return WIDE_TILES
    return TILES if keys < 64 else TILES | {"grad_key_value": (32, 64, 4, 2, None)}


def pointers(weights: Weights, turned: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The weights or their transposes, and with strips the numbers of queries and heads. Without,
    nothing reads those.
    """
    if weights.rest is not None:
        assert weights.falls is not None  # as with each strip
        return weights.tiles[:, int(turned)], weights.rest, weights.falls
    packed = weights.tiles.transpose(1, 2).contiguous() if turned else weights.tiles
    return packed, packed, packed


def layout(weights: Weights, turned: bool = False) -> tuple[int, int, int]:
    """How far apart the weights of heads are, how long a strip is, and where its lags begin."""
    length = weights.tiles.shape[-1]
    return weights.tiles.stride(0), length, AROUND if turned else length - AROUND


def empty(like: Tensor, shape: tuple, dtype: torch.dtype | None = None) -> Tensor:
    """Where a kernel writes. All outputs come from here, so that tests can guard them."""
    return like.new_empty(shape, dtype=dtype)
