"""Queries and keys, their norm and rotation, and attention: keyed mixing without a weight."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixer.ops.plain import by_head

from .cache import Past
from .configuration import MaskedMixerConfig
from .operators import turn

BASE = 10000.0  # the wavelengths of rotations, in tokens: from 2 pi to 2 pi BASE


class QueryKey(nn.Module):
    """What is done to queries and keys, (batch, tokens, heads * size), before their products: an
    RMS norm in each head (arXiv 2010.04245) with a learned gain of the queries, and a rotation by
    position (arXiv 2104.09864), as the configuration says.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.heads, self.norm = config.num_mixer_heads, config.mixer_key_norm
        self.backend = config.mixing_backend
        keys = self.heads * config.mixer_key_size
        self.gain = nn.Parameter(torch.ones(keys)) if self.norm else None

    def forward(
        self, query: Tensor, key: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if not self.norm and rotation is None:
            return query, key
        how = {"norm": self.norm, "rotation": rotation, "backend": self.backend}
        return turn(query, self.heads, gain=self.gain, **how), turn(key, self.heads, **how)


def rotations(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles by which a key of `size` numbers is turned at positions (batch
    or 1, tokens): two of (batch or 1, tokens, size / 2) fp32.
    """
    places = torch.arange(0, size, 2, device=positions.device)
    angles = positions[..., None] * BASE ** (-places / size)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """y[i] = sum over j <= i of softmax(query[i] . key[j] / sqrt(size)) * value[j] in each head
    (arXiv 1706.03762). It is KeyedConv with a weight of 1 / (i + 1) and no bias.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.heads, self.key_size = config.num_mixer_heads, config.mixer_key_size
        self.channels = config.hidden_size

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, past: Past | None = None
    ) -> Tensor:
        """As KeyedConv.forward."""
        query, key, value = (by_head(part, self.heads) for part in (query, key, value))
        if past is not None:
            both = past.update(self.place, torch.cat([key, value], -1))
        if past is None or past.is_empty:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            key, value = both[..., : self.key_size], both[..., self.key_size :]
            # (batch or 1, 1, new, length)
            place = torch.arange(both.shape[2], device=both.device)
            seen = place <= past.positions[:, None, :, None]
            y = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return y.transpose(1, 2).flatten(2)

    def flops(self, tokens: int) -> int:
        """As TriangularConv.flops."""
        return (self.heads * self.key_size + self.channels) * tokens * (tokens + 1)
