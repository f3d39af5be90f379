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


def exact(memory, x, weight, bias, residual, positions):
    """y, and the memory that mix_row leaves."""
    # an exact zero of the weight stands before what is not read
    memory = memory.double().nan_to_num(0)
    y = plain.mix_row(
        memory, x.double(), weight.double(), bias.double(), residual.double(), positions
    )
    return y, memory
