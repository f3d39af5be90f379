"""Arguments of mix_row and what they must give, in fp64."""

import torch

from mixer.ops import plain

TYPES = [  # of memory and x, and of the weight
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


def case(batch, heads, width, length, dtype, weight_dtype, ragged=True):
    """Arguments of mix_row, with NaN wherever nothing may be read."""
    generator = torch.Generator().manual_seed(length)
    context = length + 3

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    positions = torch.randint(0, length, (batch if ragged else 1, 1), generator=generator)
    positions[0] = length - 1
    memory = draw(batch, heads, context, width).to(dtype)
    is_later = torch.arange(context)[:, None] >= positions.expand(batch, 1)[:, None, None]
    memory.masked_fill_(is_later, torch.nan)
    weight = (draw(heads, 1, context, context) / length**0.5).to(weight_dtype)
    weight[..., *torch.triu_indices(context, context, 1)] = torch.nan
    x = draw(batch, 1, heads * width).to(dtype)
    residual = draw(batch, 1, heads * width).to(dtype)
    bias = draw(heads, context).to(weight_dtype)
    return memory[:, :, :length], x, weight, bias, residual, positions


def case_by_lag(batch, heads, width, columns, dtype, weight_dtype, window, has_bias):
    """Arguments of mix_row with lags and positions within and past a ring of so many columns, and
    the lags.
    """
    generator = torch.Generator().manual_seed(columns + window)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    positions = torch.randint(0, 3 * columns, (batch, 1), generator=generator)
    positions[0] = min(1, columns - 1)
    lag = (positions - torch.arange(columns)) % columns  # (batch, columns)
    is_read = (lag > 0) & (lag < window) & (lag <= positions)
    memory = draw(batch, heads, columns, width).to(dtype)
    memory.masked_fill_(~is_read[:, None, :, None], torch.nan)
    lags = (draw(heads, 1, window) / window**0.5).to(weight_dtype)
    x = draw(batch, 1, heads * width).to(dtype)
    residual = draw(batch, 1, heads * width).to(dtype)
    bias = draw(heads, columns).to(weight_dtype) if has_bias else None
    return (memory, x, None, bias, residual, positions), lags


def exact(memory, x, weight, bias, residual, positions, lags=None):
    """y, and the memory that mix_row leaves."""
    # an exact zero of the weight stands before what is not read
    memory = memory.double().nan_to_num(0)
    parameters = [None if tensor is None else tensor.double() for tensor in (weight, bias, lags)]
    weight, bias, lags = parameters
    y = plain.mix_row(memory, x.double(), weight, bias, residual.double(), positions, lags=lags)
    return y, memory
