# Copied beside every saved model: it imports from this package only files that are copied too.
"""Suffix matching: what followed the last time that the same tokens stood in the context. Attention
learns this from data (induction heads, arXiv 2209.11895); here it is looked up.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import MixingCache

MODULE_ID = (-1, 0)  # of the tokens in a cache
NONE = -(2**21)  # before the first token; below it, no number stands for anything
GROUP_STRIDE = 2**25  # more than there are numbers for tokens


def followers(ids: Tensor, positions: Tensor, context: int, longest: int) -> tuple[Tensor, Tensor]:
    """What followed the latest earlier position, fewer than `context` tokens back, where the same
    last tokens stood: as many as possible of up to `longest`.

    ids: (batch, length) int64, of the tokens so far, and of anything behind them. positions: (batch
    or 1, new) int64, of the new ones among them. Returns token and number of equal tokens, 0 where
    there is no such position: (batch, new) int64 each.
    """
    column = torch.arange(ids.shape[1], device=ids.device)[None]
    last = positions.amax(1, keepdim=True)
    ids = ids.where(column <= last, -1 - column)  # unlike any other
    positions = positions.clamp(min=0).expand(ids.shape[0], -1)
    token = torch.zeros_like(positions)
    equal = torch.zeros_like(positions)
    alike = column < last
    group = 0
    for back in range(longest):
        before = ids.roll(back, dims=1).where(column >= back, NONE)
        if positions.shape[1] == 1:  # generation: one token is compared with all others
            alike = alike & (before == before.gather(1, positions))
            latest = column.where(alike, -1).amax(1, keepdim=True)
        else:  # columns of one group have the same last `back` tokens
            key, order = (group * GROUP_STRIDE + before).sort(dim=1, stable=True)
            same = F.pad(key[:, 1:] == key[:, :-1], (1, 0))
            earlier = F.pad(order, (1, -1)).where(same, -1)
            latest = torch.empty_like(order).scatter_(1, order, earlier).gather(1, positions)
            group = torch.empty_like(order).scatter_(1, order, (~same).cumsum(1))
        is_match = (latest >= 0) & (positions - latest < context) & (positions >= back)
        token = ids.gather(1, latest + 1).where(is_match, token)
        equal = torch.where(is_match, back + 1, equal)
    return token, equal


class Table(nn.Embedding):
    """An embedding whose rows start alike."""

    def __init__(self, rows: int, channels: int, start: float):
        self.start = start
        super().__init__(rows, channels)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)


class SuffixMatch(nn.Module):
    """The embedding of the token that `followers` finds, times a gain for the number of equal
    tokens: (batch, new, channels). Starts at zero.
    """

    def __init__(self, config):
        super().__init__()
        self.context = config.max_position_embeddings
        self.longest = config.suffix_match
        self.embed_tokens: nn.Embedding = Table(config.vocab_size, config.hidden_size, start=0)
        self.gain = Table(self.longest, config.hidden_size, start=1)

    def forward(self, input_ids: Tensor, past: MixingCache | None) -> Tensor:
        ids = input_ids
        if past is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        else:
            new = ids[:, None, :, None]  # one head of one channel
            ring = past.append(MODULE_ID, new, self.context + self.longest)
            positions = past.positions
            if not past.is_empty:
                ordered, first = past.in_order(MODULE_ID, ring)
                ids = ordered[:, 0, :, 0]
                positions = positions - first
        token, equal = followers(ids, positions, self.context, self.longest)
        number = F.one_hot(equal, self.longest + 1)[..., 1:]  # all zeros where nothing was found
        # A product, because an embedding's gradient is slow where many tokens share few rows.
        return self.embed_tokens(token) * (number.to(self.gain.weight.dtype) @ self.gain.weight)
