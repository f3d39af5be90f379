"""Arguments of mix_row and what they must give, in fp64."""

import torch

from mixer.ops import plain

TYPES = [
    (torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
]  # fmt: skip


def case(batch, heads, width, length, dtype, weight_dtype, ragged=True):
    """Arguments of mix_row, with NaN wherever nothing may be read."""
    generator = torch.Generator().manual_seed(length)
    context = length + 3

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    positions = torch.randint(0, length, (batch if ragged else 1, 1), generator=generator)
    positions[0] = length - 1
    everywhere = positions.expand(batch, 1)
    memory = draw(batch, heads, context, width).to(dtype)
    memory.masked_fill_(torch.arange(context)[:, None] >= everywhere[:, None, None], torch.nan)
    weight = (draw(heads, 1, context, context) / length**0.5).to(weight_dtype)
    weight[..., *torch.triu_indices(context, context, 1)] = torch.nan
    x, residual = (draw(batch, 1, heads * width).to(dtype) for _ in range(2))
    return (
        memory[:, :, :length],
        x,
        weight,
        draw(heads, context).to(weight_dtype),
        residual,
        positions,
    )


def exact(memory, x, weight, bias, residual, positions):
    # an exact zero of the weight stands before what is not read
    memory = memory.double().nan_to_num(0)
    return plain.mix_row(
        memory, *(t.double() for t in (x, weight, bias, residual)), positions
    ), memory
