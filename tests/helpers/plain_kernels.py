"""The functions of `mixer.ops.cuda` in plain PyTorch, on any device and type: tests put this module
in its place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixer.models.masked_mixer.plain import by_each_head, merge_heads, split_heads
from mixer.ops.cuda import packed_columns


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    corner = weight[..., :tokens, :tokens].tril().to(dtype)
    return F.pad(corner, (0, packed_columns(tokens) - tokens)).contiguous()


def forward(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    heads, tokens = packed.shape[0], x.shape[1]
    y = by_each_head(packed[..., :tokens], split_heads(x, heads))
    if bias is not None:
        y = y + bias[:, None, :tokens, None].to(y.dtype)
    y = merge_heads(y)
    return (y if residual is None else y + residual).clone(memory_format=torch.contiguous_format)


def grad_input(dy: Tensor, packed: Tensor) -> Tensor:
    heads, tokens = packed.shape[0], dy.shape[1]
    dx = by_each_head(packed[..., :tokens].mT, split_heads(dy, heads))
    return merge_heads(dx).clone(memory_format=torch.contiguous_format)


def grad_weight(
    dy: Tensor, x: Tensor, context: int, heads: int, dtype: torch.dtype, with_bias: bool
) -> tuple[Tensor, Tensor]:
    missing = context - x.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    dy, x = split_heads(dy, heads), split_heads(x, heads)  # (heads, batch, tokens, width)
    dweight = (dy @ x.mT).sum(1, dtype=wide).tril()
    dbias = F.pad(dy.sum((1, 3), dtype=wide), (0, missing))
    dweight = F.pad(dweight, (0, missing, 0, missing))
    return dweight.to(dtype), (dbias if with_bias else dbias[0, :0].clone()).to(dtype)
