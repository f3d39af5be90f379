# Copied beside every saved model: it imports from this package only files that are copied too.
"""The operators of `mixer.ops` in plain PyTorch, and single rows of them for generation; weights by
lag, W[i, j] = lags[i - j], with one number per distance of two tokens (arXiv 2605.06683).

`triangular_conv`, `keyed_conv` and `mix_row` have the operators' arguments; `backend` has no
effect. Arguments are not checked.

Shapes used throughout: x, y, residual (batch, tokens, channels); weight (heads, taps, context,
context), output first; bias (heads, context).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BACKENDS = ("auto", "cuda", "dense")

# Keyed mixing works on panels of rows, at most so many of at least so many rows. p panels compute
# (p + 1) / 2p of the square, but thin ones run at a lower rate, and many take long to compile.
PANELS = 8
PANEL_ROWS = 64
FEW_LAGS = 16  # of which each is a product of its own
EPSILON = 1e-6  # of the norm of queries and keys


def in_autocast_dtype(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype where it is on, except fp64. Autocast itself leaves the
    output of an embedding in fp32, and with it the residual stream: norms and sums would move twice
    the bytes. None stays None.
    """
    tensors = (x, *others)
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    # to() costs the host a dispatch even where it changes nothing
    return tuple(t if t is None or t.dtype == dtype else t.to(dtype) for t in tensors)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, channels) -> view (heads, batch, tokens, channels of a head)."""
    return x.unflatten(-1, (heads, -1)).permute(2, 0, 1, 3)


def by_head(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, channels) -> view (batch, heads, tokens, channels of a head)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(heads, batch, tokens, channels of a head) -> (batch, tokens, channels)."""
    return x.permute(1, 2, 0, 3).flatten(2)


def seen_by_tap(x: Tensor, tap: int, taps: int) -> Tensor:
    """out[..., c] = x[..., c + tap - (taps - 1) // 2], zero outside the head: as in
    nn.Conv1d(padding="same"), (taps - 1) // 2 of the taps look to the left.
    """
    distance = tap - (taps - 1) // 2
    if distance == 0:
        return x
    if abs(distance) >= x.shape[-1]:
        return torch.zeros_like(x)
    return F.pad(x, (-distance, distance))


def triangular_conv(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    backend: str = "dense",
    *,
    lags: Tensor | None = None,
) -> Tensor:
    """The masked-weight matmul, as one would write it in PyTorch: the weight is masked with tril
    and multiplied in full; by lag, in work of tokens times window.
    """
    tokens = x.shape[1]
    mixing = weight if lags is None else lags
    assert mixing is not None
    heads, taps = mixing.shape[:2]
    x_by_head = split_heads(x, heads)  # (heads, batch, tokens, channels of a head)
    y: Tensor | None = None
    for tap in range(taps):
        inputs = seen_by_tap(x_by_head, tap, taps)
        if lags is None:
            triangle = mixing[:, tap, :tokens, :tokens].tril().to(x.dtype)
            mixed = by_each_head(triangle, inputs)
        else:
            mixed = mix_by_lag(inputs, lags[:, tap].to(x.dtype))
        y = mixed if y is None else y + mixed
    assert y is not None  # there is a tap
    if bias is not None:
        y = y + for_positions(tokens, bias)[:, None, :tokens, None].to(y.dtype)
    y = merge_heads(y)
    y = y if residual is None else y + residual
    return y.contiguous()  # of one text or token, a transposed view may have come so far


def mix_by_lag(x: Tensor, lags: Tensor) -> Tensor:
    """y[i] = sum over lags k of lags[h, k] * x[i - k], for x (heads, batch, tokens, width) and lags
    (heads, window), in work and memory of tokens times window.
    """
    tokens = x.shape[2]
    window = lags.shape[-1]
    if window <= FEW_LAGS:
        earlier = F.pad(x, (0, 0, window - 1, 0))
        y = torch.zeros_like(x)
        for lag in range(window):
            shifted = earlier.narrow(2, window - 1 - lag, tokens)
            y = y + lags[:, None, lag, None, None] * shifted
        return y
    # Of torch.export; a number of panels would fix the number of tokens.
    if isinstance(tokens, torch.SymInt) or tokens <= 2 * window:
        return by_each_head(toeplitz(for_tokens(tokens, lags), tokens), x)
    # Panels of `window` rows, of which all have the same weights: row r of a panel has lag k at
    # column r + window - 1 - k.
    columns = torch.arange(2 * window - 1, device=lags.device)
    band = lags_at(lags, columns[:window, None] + window - 1 - columns)
    padded = F.pad(x, (0, 0, window - 1, -tokens % window))
    panels = padded.unfold(2, 2 * window - 1, window)  # (heads, batch, panels, width, columns)
    y = torch.einsum("hrc,hbpwc->hbprw", band, panels)
    return y.flatten(2, 3)[:, :, :tokens]


def by_each_head(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix (heads, tokens, tokens) @ x (heads, batch, tokens, width)."""
    if len(matrix) == 1 or x.is_cuda:
        return torch.matmul(matrix[:, None], x)
    # All samples in one product: torch.matmul would copy the matrix for each sample, and on a CPU
    # those copies are what takes time.
    return torch.einsum("hij,hbjc->hbic", matrix, x)


def mix_rows(
    memory: Tensor, rows: Tensor, bias: Tensor | None, residual: Tensor | None, positions: Tensor
) -> Tensor:
    """The triangular convolution of a few new tokens, given the inputs of all tokens so far.

    Args:
        memory: (batch, heads, length, channels of a head), the inputs of positions 0 to length - 1,
            those of the new tokens included. A token does not read positions after its own.
        rows: the new tokens' rows of the weight, (batch or 1, heads, taps, new, length), as
            `rows_at` returns them.
        bias: (heads, context), or None.
        residual: (batch, new, channels), or None.
        positions: (batch or 1, new) int64, of each new token; 1 if all texts have the same.

    Returns:
        (batch, new, channels), in memory's dtype.
    """
    taps, new = rows.shape[2:4]
    # One product for all taps, so that the memory is read once.
    products = (rows.flatten(2, 3) @ memory).unflatten(2, (taps, new))
    # A shift over the channels may come before or after the mixing of tokens. Shifting the few
    # results is cheaper than shifting all inputs.
    y = seen_by_tap(products[:, :, 0], 0, taps)
    for tap in range(1, taps):
        y = y + seen_by_tap(products[:, :, tap], tap, taps)
    if bias is not None:
        y = y + at(positions, bias)[..., None].to(y.dtype)  # (batch or 1, heads, new, 1)
    y = y.transpose(1, 2).flatten(2)
    # Under autocast the residual stream has the autocast type, as y has.
    return y if residual is None else y + residual.to(y.dtype)


def rows_at(positions: Tensor, weight: Tensor, memory: Tensor) -> Tensor:
    """The weight's rows at positions (batch or 1, new), for all tokens of a memory (batch, heads,
    length, ...) and in its dtype: (batch or 1, heads, taps, new, length), zero for later tokens.
    """
    length = memory.shape[2]
    rows = weight[..., :length][:, :, positions]  # (heads, taps, batch or 1, new, length)
    # (batch or 1, new, length)
    later = torch.arange(length, device=memory.device) > positions[..., None]
    return rows.masked_fill(later, 0).to(memory.dtype).permute(2, 0, 1, 3, 4)


def norm_and_rotate(
    x: Tensor,
    heads: int,
    *,
    norm: bool = True,
    rotation: tuple[Tensor, Tensor] | None = None,
    gain: Tensor | None = None,
    backend: str = "dense",
) -> Tensor:
    """An RMS norm in each head, then a rotation by position, then a gain, of queries or keys.

    Args:
        x: (batch, tokens, heads * size), head after head, the size even.
        norm: divide a head's numbers by their root mean square (arXiv 2010.04245).
        rotation: cosines and sines of angles (arXiv 2104.09864), two of (batch or 1, tokens, size /
            2) fp32. Number c of a head is rotated with number c + size / 2.
        gain: (heads * size,), multiplies the result.
        backend: no effect; models saved by earlier versions pass it.

    Returns:
        (batch, tokens, heads * size) in the dtype of x, computed in fp32 or wider.
    """
    y = x.unflatten(-1, (heads, -1))
    y = y.to(torch.promote_types(x.dtype, torch.float32))
    if norm:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPSILON)
    if rotation is not None:
        cosines, sines = rotation
        cos = cosines[:, :, None]  # the same for all heads
        sin = sines[:, :, None]
        left, right = y.chunk(2, -1)
        y = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    y = y.flatten(-2)
    return (y if gain is None else y * gain).to(x.dtype)


def keyed_conv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    *,
    lags: Tensor | None = None,
    decay: Tensor | None = None,
    backend: str = "dense",
) -> Tensor:
    """Keyed mixing of whole texts, one panel of rows after another: memory holds only the products
    of one panel's queries with the keys up to its last row.
    """
    tokens = query.shape[1]
    heads, context = bias.shape
    if lags is not None and tokens <= context:  # past it, a square would be larger than all else
        weight = weight_by_lag(lags, decay, tokens)
    bias = for_positions(tokens, bias)
    query = by_head(query, heads)
    key = by_head(key, heads)
    value = by_head(value, heads)
    positions = torch.arange(tokens, device=query.device)
    if isinstance(tokens, torch.SymInt):
        # Of torch.export: a loop over panels would fix the number of tokens.
        height = tokens
        starts = [0]
    else:
        height = max(PANEL_ROWS, min(-(-tokens // PANELS), context))
        starts = range(0, tokens, height)
    outputs = []
    for start in starts:
        end = min(start + height, tokens)
        first = max(0, start + 1 - context)  # the first key that a query of this panel reads
        panel_positions = positions[None, start:end] - first
        lag = lags_from(panel_positions, end - first)
        if weight is not None:
            rows = weight[:, 0, start:end, first:end].tril(start - first)
        else:
            assert lags is not None
            rows = rows_by_lag(lags, decay, panel_positions, lag)[0, :, 0]
        output = mix_keyed(
            query[:, :, start:end],
            key[:, :, first:end],
            value[:, :, first:end],
            rows,
            bias[:, start:end],
            panel_positions,
            lag,
            context,
        )
        outputs.append(output)
    return torch.cat(outputs, 1)


def mix_keyed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    bias: Tensor,
    positions: Tensor,
    lag: Tensor,
    context: int,
) -> Tensor:
    """Keyed mixing of some tokens: how well each key matches a query, relative to the mean over the
    last `context` keys up to its position, times the weight's row.

    Args:
        query: (batch, heads, new, size of a key).
        key, value: (batch, heads, length, ...).
        rows: (batch or 1, heads, new, length), zero for later tokens; bias (..., heads, new).
        positions: (batch or 1, new) int64, of the queries.
        lag: (batch or 1, new, length) int64, how far before a query each key stands, negative for
            keys that it does not read.

    Returns:
        (batch, new, channels), with matches in fp32 or wider.
    """
    products = query @ key.transpose(-1, -2)  # (batch, heads, new, length)
    seen = is_seen(lag, context)
    match_dtype = torch.promote_types(products.dtype, torch.float32)
    scores = products.to(match_dtype) * query.shape[-1] ** -0.5
    count = (positions[:, None, :, None] + 1).clamp(max=context)
    # 1 where all keys match alike
    matches = scores.masked_fill(~seen, -torch.inf).softmax(-1) * count
    y = (matches * rows.to(match_dtype)).to(value.dtype) @ value
    return (y + bias[..., None].to(y.dtype)).transpose(1, 2).flatten(2)


def keyed_rows(
    query: Tensor, memory: Tensor, rows: Tensor, bias: Tensor, positions: Tensor, lag: Tensor
) -> Tensor:
    """`mix_keyed` of a few new tokens, given the keys and values of earlier tokens side by side:
    memory (batch, heads, length, size of a key + channels of a head). rows, bias and positions are
    those of `mix_rows`, lag that of `mix_keyed`.
    """
    key_size = query.shape[-1]
    key, value = memory.split([key_size, memory.shape[-1] - key_size], -1)
    biases = at(positions, bias)
    return mix_keyed(query, key, value, rows[:, :, 0], biases, positions, lag, bias.shape[-1])


def lags_from(positions: Tensor, length: int) -> Tensor:
    """How far before tokens at positions (batch or 1, new) the first `length` tokens stand: (batch
    or 1, new, length), negative for later ones.
    """
    return positions[..., None] - torch.arange(length, device=positions.device)


def is_seen(lag: Tensor, context: int) -> Tensor:
    """Which tokens, `lag` (batch or 1, new, length) before others, are among the last `context` up
    to these: (batch or 1, 1, new, length) bool.
    """
    return ((lag >= 0) & (lag < context))[:, None]


def write_rows(
    memory: Tensor, rows: Tensor, columns: Tensor, is_token: Tensor | None = None
) -> None:
    """Writes rows (batch, heads, new, channels of a head) into columns (batch or 1, new) of the
    memory, but for those that are no token.
    """
    index = columns[:, None, :, None].expand(rows.shape)
    if is_token is not None:
        rows = rows.where(is_token[:, None, :, None], memory.gather(2, index))
    memory.scatter_(2, index, rows)


def last_rows(rows: Tensor, positions: Tensor, columns: int) -> Tensor:
    """What a ring of so many columns holds after whole texts: rows (batch, heads, tokens, channels
    of a head) at positions (batch or 1, tokens), -1 for padding, which stands behind the tokens.
    Returns (batch, heads, at most `columns`, channels); what stands in a column without a token is
    any of the text's rows, which nobody reads.
    """
    last = positions.amax(1, keepdim=True)  # (batch or 1, 1)
    column = torch.arange(min(columns, rows.shape[2]), device=rows.device)
    position = last - (last - column) % columns  # the last one that has this column
    source = position.clamp(min=0)[:, None, :, None]
    return rows.gather(2, source.expand(*rows.shape[:2], -1, rows.shape[3]))


def mix_row(
    memory: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    positions: Tensor,
    backend: str = "auto",
    *,
    lags: Tensor | None = None,
) -> Tensor:
    """One new token of each text, x (batch, 1, channels): written into the memory and mixed."""
    heads, columns = memory.shape[1:3]
    if weight is not None:
        write_rows(memory, by_head(x, heads), positions)
        return mix_rows(memory, rows_at(positions, weight, memory), bias, residual, positions)
    assert lags is not None
    write_rows(memory, by_head(x, heads), positions % columns)
    lag = torch.arange(min(lags.shape[-1], columns), device=x.device)
    column = (positions - lag) % columns  # (batch or 1, lags)
    inputs = memory.gather(2, column[:, None, :, None].expand(len(x), heads, -1, memory.shape[3]))
    rows = lags[..., : len(lag)].to(memory.dtype)  # (heads, taps, lags)
    rows = rows.masked_fill((lag > positions)[:, None, None], 0)  # (batch or 1, heads, taps, lags)
    return mix_rows(inputs, rows[:, :, :, None], bias, residual, positions)


# ------------------------------------------------------------------------- weights by lag


def for_tokens(tokens: int, lags: Tensor) -> Tensor:
    """Numbers by lag, (..., window), with zeros for further lags of `tokens` tokens."""
    missing = tokens - lags.shape[-1]
    return lags if missing <= 0 else F.pad(lags, (0, missing))


def for_positions(tokens: int, numbers: Tensor) -> Tensor:
    """Numbers by position, (..., context), for `tokens` tokens: later ones repeat the last."""
    missing = tokens - numbers.shape[-1]
    if missing <= 0:
        return numbers
    last = numbers[..., -1:]
    return torch.cat([numbers, last.expand(*numbers.shape[:-1], missing)], -1)


def at(positions: Tensor, numbers: Tensor) -> Tensor:
    """numbers (heads, context) at positions (batch or 1, new), past the context the last number,
    for padding the first: (batch or 1, heads, new).
    """
    return numbers[:, positions.clamp(0, numbers.shape[-1] - 1)].transpose(0, 1)


def toeplitz(lags: Tensor, tokens: int) -> Tensor:
    """The weight of the first `tokens` tokens: (..., context) -> (..., tokens, tokens), zero above
    the diagonal. All that torch derives works, and gradients are summed in a fixed order.
    """
    lags = lags[..., :tokens]
    # In rows of 2 tokens numbers that are read in rows of one number less, each begins one further
    # to the left than the one before.
    row = torch.cat([lags[..., :1], F.pad(lags[..., 1:].flip(-1), (tokens, 0))], -1)
    rows = row[..., None, :].expand(*row.shape[:-1], tokens, -1).flatten(-2)[..., :-tokens]
    return rows.unflatten(-1, (tokens, 2 * tokens - 1))[..., :tokens]


def lags_at(lags: Tensor, lag: Tensor) -> Tensor:
    """lags[..., lag], zero where there is no such lag: (..., context) -> (..., *shape of lag)."""
    index = lag.clamp(0, lags.shape[-1] - 1)
    return lags[..., index].masked_fill(lag != index, 0)


def falling(decay: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """exp(-lag * decay) by lag, and its sums over the lags up to each: (heads,) -> two of (heads,
    tokens). So toeplitz(first) / second[..., None] has rows that add up to 1: means of the tokens
    so far, in which nearer tokens count for more.
    """
    by_lag = (-torch.arange(tokens, device=decay.device) * decay[:, None]).exp()
    return by_lag, by_lag.cumsum(-1)


def weight_by_lag(lags: Tensor, decay: Tensor | None, tokens: int) -> Tensor:
    """The weight of the first tokens: lags (heads, taps, context) and decay (heads,) -> (heads,
    taps, tokens, tokens), zero above the diagonal. With decay, which keyed mixing has, a mean of
    the tokens so far is added, in which nearer ones count for more.
    """
    weight = toeplitz(for_tokens(tokens, lags), tokens)
    if decay is None:
        return weight
    by_lag, sums = falling(decay, lags.shape[-1])
    means = toeplitz(for_tokens(tokens, by_lag), tokens)
    sums = for_positions(tokens, sums)[:, :tokens, None]
    return weight + (means / sums)[:, None]


def rows_by_lag(lags: Tensor, decay: Tensor | None, positions: Tensor, lag: Tensor) -> Tensor:
    """Rows of a weight by lag: lags (heads, taps, window), decay (heads,), positions (batch or 1,
    new), and how far back each token stands, lag (batch or 1, new, length), negative for those that
    are not read -> (batch or 1, heads, taps, new, length), zero for these and beyond the window.
    """
    rows = lags_at(lags, lag)  # (heads, taps, batch or 1, new, length)
    if decay is not None:
        by_lag, sums = falling(decay, lags.shape[-1])
        sums = at(positions, sums).transpose(0, 1)
        rows = rows + (lags_at(by_lag, lag) / sums[..., None])[:, None]
    return rows.permute(2, 0, 1, 3, 4)


def diagonal_sums(matrix: Tensor) -> Tensor:
    """Sums along the diagonals on and below the main one: (..., context, context) -> (...,
    context). Entry l is the sum over i of matrix[..., i, i - l].
    """
    context = matrix.shape[-1]
    # A step of context + 1 numbers goes down a diagonal, so in rows of so many numbers each
    # diagonal is a column: neighbours in memory are summed side by side. Column 0 is the main
    # diagonal but for its last number. Column c is the diagonal of lag context + 1 - c, behind the
    # end of one above the main diagonal.
    skewed = matrix.flatten(-2)[..., :-1].unflatten(-1, (context - 1, context + 1))
    row = torch.arange(context - 1, device=matrix.device)[:, None]
    column = torch.arange(context + 1, device=matrix.device)
    on_or_below = (column == 0) | (row + column >= context)
    sums = torch.where(on_or_below, skewed, 0).sum(-2)
    return torch.cat([sums[..., :1] + matrix[..., -1, -1:], sums[..., 2:].flip(-1)], -1)
