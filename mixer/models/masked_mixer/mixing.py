"""Token mixing: what a masked mixer has in place of attention (arXiv 2409.01482, section 2).

A `TokenMixing` is what a block calls. The variants below are built around one or two convolutions,
and `VARIANTS` chooses between them. A new variant is one class here, a line in VARIANTS and a field
of MixerOptions in configuration.py.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixer.ops.plain import by_head

from .attention import Attention, QueryKey
from .cache import Memory
from .configuration import RECURRENT, MaskedMixerConfig
from .convolution import KeyedConv, KeyedLagConv, LagConv, TriangularConv
from .layers import Linear, gelu
from .recurrent import RecurrentConv


def convolution(config: MaskedMixerConfig, heads: int | None = None) -> TriangularConv:
    """The convolution with the configuration's mixing weight; `heads` in place of its heads."""
    form = config.mixing_weight
    if form in RECURRENT:
        return RecurrentConv(config, heads)
    return LagConv(config, heads) if form == "lags" else TriangularConv(config, heads)


class TokenMixing(nn.Module):
    """residual + mix(x): what a block calls to mix its tokens. A variant of it defines `mix`.

    A variant with other than one convolution says how many in `convolutions`: generation keeps a
    memory for each. Blocks may have different numbers.
    """

    convolutions = 1

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        memories: Sequence[Memory] = (),
        positions: Tensor | None = None,
        **more,
    ) -> Tensor:
        """x, residual and the result are (batch, tokens, channels); `memories` has one for each
        convolution, or none; `positions` are those of TriangularConv; keyed mixing takes `more`.
        """
        memories = memories or (None,) * self.convolutions
        return self.mix(x, residual, memories, positions, **more)


class Flat(TokenMixing):
    """One triangular convolution, or with mixer_expansion two with a GELU between. With one head it
    is the paper's flat mixer. Several heads mix their own channels between an in-projection and an
    out-projection, whose weights are laid out head after head; without mixer_projections nothing
    but the MLP connects the heads. Between blocks of keyed mixing it has one head.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        heads = 1 if config.mixer_key_size else config.num_mixer_heads
        size, bias = config.hidden_size, config.linear_bias
        self.projects = heads > 1 and config.mixer_projections
        self.convolutions = 2 if config.mixer_expansion else 1
        if self.projects:
            self.in_proj = Linear(size, size, bias=bias)
        self.conv = convolution(config, heads)
        if self.convolutions == 2:
            self.second_conv = convolution(config, heads)
        if self.projects:
            self.out_proj = Linear(size, size, bias=bias)

    def mix(self, x, residual, memories, positions):
        last = None if self.projects else residual  # what the last convolution adds
        x = self.in_proj(x) if self.projects else x
        if self.convolutions == 2:
            x = gelu(self.conv(x, None, memories[0], positions))
            x = self.second_conv(x, last, memories[1], positions)
        else:
            x = self.conv(x, last, memories[0], positions)
        return residual + self.out_proj(x) if self.projects else x


class Gated(TokenMixing):
    """out_proj(query * mix(key * value)), each of the three a projection of x: a token decides,
    channel by channel, what it offers to others and what it takes of them.

    As in Hyena with two gates (arXiv 2302.10866, section 3) and H3 (arXiv 2212.14052), with a
    triangular convolution in place of a long one. in_proj holds the projections: queries, keys,
    values, each laid out head after head.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        parts = [config.hidden_size] * 3
        self.in_proj = Linear(config.hidden_size, *parts, bias=config.linear_bias)
        self.conv = convolution(config)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)

    def mix(self, x, residual, memories, positions):
        query, key, value = self.in_proj(x).chunk(3, dim=-1)
        mixed = self.conv(key * value, None, memories[0], positions)
        return residual + self.out_proj(query * mixed)


class Keyed(TokenMixing):
    """out_proj(mixed values), where a KeyedConv or attention mixes them by queries and keys, all
    three projections of x: so a token finds earlier ones by what they are, and not by distance
    alone. in_proj holds the projections as in Gated.

    With mixer_key_shift, keys also have a learned share of the token's before, channel by channel.
    So a query can look for what follows a token like its own (arXiv 2209.11895, "induction heads").
    The keys without that share have a memory of their own, the second one.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        keys = config.num_mixer_heads * config.mixer_key_size
        self.parts = [keys, keys, config.hidden_size]
        self.in_proj = Linear(config.hidden_size, *self.parts, bias=config.linear_bias)
        self.query_key = QueryKey(config)
        # Not `conv`: so checkpoints of an earlier keyed mixing, another function, lack its weights.
        by_lag = config.mixing_weight == "lags"
        kind = Attention if config.mixer_attention else KeyedLagConv if by_lag else KeyedConv
        self.keyed_conv = kind(config)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)
        self.key_share = nn.Parameter(torch.zeros(keys)) if config.mixer_key_shift else None
        self.convolutions = 2 if config.mixer_key_shift else 1

    def mix(self, x, residual, memories, positions, rotation=None, values=None):
        """rotation: of queries and keys, as `rotations` gives it. values: (batch, tokens,
        channels), added to the values.
        """
        query, key, value = self.in_proj(x).split(self.parts, dim=-1)
        if self.key_share is not None:
            before = self.previous(key, memories[1], positions)
            key = key + self.key_share.to(key.dtype) * before
        query, key = self.query_key(query, key, rotation)
        value = value if values is None else value + values
        return residual + self.out_proj(self.keyed_conv(query, key, value, memories[0], positions))

    def previous(self, key: Tensor, memory: Memory | None, positions: Tensor | None) -> Tensor:
        """The keys of the tokens before those of key (batch, tokens, channels), zero before the
        first.
        """
        if memory is None:
            return F.pad(key[:, :-1], (0, 0, 1, 0))
        # (batch, heads, length, size of a key)
        past = memory.update(by_head(key, self.keyed_conv.heads), positions)
        before = (positions - 1).clamp(min=0)[:, None, :, None]  # (batch or 1, 1, new, 1)
        rows = past.gather(2, before.expand(*past.shape[:2], -1, past.shape[3]))
        rows = rows.masked_fill((positions == 0)[:, None, :, None], 0)
        return rows.transpose(1, 2).flatten(2)


# Which blocks of which configurations have which variant: the first line whose condition holds for
# the configuration and the number of the block, from 0 on, decides.
Condition = Callable[[MaskedMixerConfig, int], bool]
VARIANTS: list[tuple[Condition, type[TokenMixing]]] = [
    (lambda c, block: c.mixer_key_size > 0 and (block + 1) % c.mixer_keyed_every == 0, Keyed),
    (lambda c, block: c.mixer_gate, Gated),
    (lambda c, block: True, Flat),
]


def mixing_class(config: MaskedMixerConfig, block: int) -> type[TokenMixing]:
    """The variant of token mixing that a configuration asks for in a block."""
    return next(variant for holds, variant in VARIANTS if holds(config, block))
