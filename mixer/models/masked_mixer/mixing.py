# Copied beside every saved model: it imports from this package only files that are copied too.
"""Token mixing: what a masked mixer has instead of attention (arXiv 2409.01482, section 2).

A block calls a variant as mixing(x, residual, past), which returns residual + mix(x), each (batch,
tokens, channels). Variants are built around convolutions, to which they pass `past`. A new one is a
class here, a line in VARIANTS and a field of MixerOptions: docs/add_a_mixing_variant.md.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixer.ops.plain import by_head, is_seen, lags_from, norm_and_rotate

from .cache import MixingCache, ModuleId
from .configuration import RECURRENT, MaskedMixerConfig
from .convolution import KeyedConv, KeyedLagConv, LagConv, RecurrentConv, TriangularConv
from .model_options import keyed_blocks

BASE = 10000.0  # the wavelengths of rotations, in tokens: from 2 pi to 2 pi BASE


def linear(in_features: int, *projection_sizes: int, bias: bool = True) -> nn.Linear:
    """One linear layer, or several with the same input, whose outputs are concatenated.
    `projection_sizes` has the out_features of each, for optimizers of whole matrices. No class of
    its own: quantizing and other tools replace layers of the very type nn.Linear.
    """
    layer = nn.Linear(in_features, sum(projection_sizes), bias)
    layer.projection_sizes = projection_sizes  # pyright: ignore[reportArgumentType]
    return layer


def convolution(config: MaskedMixerConfig, heads: int | None = None) -> TriangularConv:
    """The convolution with the configuration's mixing weight; `heads` overrides its heads."""
    form = config.mixing_weight
    if form in RECURRENT:
        return RecurrentConv(config, heads)
    return LagConv(config, heads) if form == "lags" else TriangularConv(config, heads)


class Flat(nn.Module):
    """One triangular convolution, or with mixer_expansion two with a GELU between them. With one
    head, it is the paper's flat mixer. Several heads mix their own channels between two
    projections; without mixer_projections, only the MLP connects the heads. Between keyed blocks
    there are no projections, and with mixer_projections there is one head.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        is_between_keyed = config.mixer_key_size and config.mixer_projections
        heads = 1 if is_between_keyed else config.num_mixer_heads
        size = config.hidden_size
        self.projects = heads > 1 and config.mixer_projections
        if self.projects:
            self.in_proj = linear(size, size, bias=config.linear_bias)
        self.conv = convolution(config, heads)
        self.second_conv = convolution(config, heads) if config.mixer_expansion else None
        if self.projects:
            self.out_proj = linear(size, size, bias=config.linear_bias)

    def forward(self, x: Tensor, residual: Tensor, past: MixingCache | None = None) -> Tensor:
        if self.projects:
            return residual + self.out_proj(self._mixed(self.in_proj(x), None, past))
        return self._mixed(x, residual, past)

    def _mixed(self, x: Tensor, residual: Tensor | None, past: MixingCache | None) -> Tensor:
        if self.second_conv is None:
            return self.conv(x, residual, past)
        return self.second_conv(gelu(self.conv(x, None, past)), residual, past)


class Gated(nn.Module):
    """out_proj(query * mix(key * value)), with all three projected from x: a token decides, channel
    by channel, what it offers to others and what it takes from them. With other convolutions, Hyena
    with two gates (arXiv 2302.10866, section 3) and H3 (arXiv 2212.14052) do the same. in_proj has
    the projections in the order queries, keys, values, each laid out head after head.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        projection_sizes = [config.hidden_size] * 3
        self.in_proj = linear(config.hidden_size, *projection_sizes, bias=config.linear_bias)
        self.conv = convolution(config)
        self.out_proj = linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)

    def forward(self, x: Tensor, residual: Tensor, past: MixingCache | None = None) -> Tensor:
        query, key, value = self.in_proj(x).chunk(3, dim=-1)
        return residual + self.out_proj(query * self.conv(key * value, None, past))


class Keyed(nn.Module):
    """out_proj(mixed values): a KeyedConv or attention mixes values by queries and keys, all three
    projected from x. A token thus finds earlier ones by content, and not by distance alone. in_proj
    has the projections as in Gated.

    Before their products, queries and keys may get an RMS norm in each head (arXiv 2010.04245) with
    a learned gain of the queries, and a rotation by position (arXiv 2104.09864). Before that, a key
    may get a learned share of the previous token's key, channel by channel. A query can then look
    for what follows a token like its own (arXiv 2209.11895, "induction heads").
    """

    module_id: ModuleId = (0, 0)  # set by the model

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.heads = config.num_mixer_heads
        self.norm = config.mixer_key_norm
        keys = config.num_mixer_heads * config.mixer_key_size
        self.projection_sizes = [keys, keys, config.hidden_size]
        self.in_proj = linear(config.hidden_size, *self.projection_sizes, bias=config.linear_bias)
        # Of queries alone: a gain of keys would do the same. Checkpoints have it by this name.
        self.query_key = NormAndRotate(keys if self.norm else 0)
        if config.mixer_attention:
            conv = Attention(config)
        elif config.mixing_weight == "lags":
            conv = KeyedLagConv(config)
        else:
            conv = KeyedConv(config)
        # Not `conv`: so checkpoints of an earlier keyed mixing, another function, lack its weights.
        self.keyed_conv = conv
        self.out_proj = linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)
        self.key_share = nn.Parameter(torch.zeros(keys)) if config.mixer_key_shift else None

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        past: MixingCache | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """rotation: from `rotations`."""
        query, key, value = self.in_proj(x).split(self.projection_sizes, dim=-1)
        if self.key_share is not None:
            key = key + self.key_share.to(key.dtype) * self._previous(key, past)
        if self.norm or rotation is not None:
            query = self.query_key(query, self.heads, self.norm, rotation)
            key = norm_and_rotate(key, self.heads, norm=self.norm, rotation=rotation)
        return residual + self.out_proj(self.keyed_conv(query, key, value, past))

    def _previous(self, key: Tensor, past: MixingCache | None) -> Tensor:
        """Of key (batch, tokens, channels), each token's previous key; zero for the first token."""
        if past is None:
            return shifted(key)
        past.append(self.module_id, by_head(key, 1), 2)
        return shifted(key) if past.is_empty else past.previous(self.module_id)


def shifted(x: Tensor) -> Tensor:
    """Of x (batch, tokens, channels), each token's predecessor; zero for the first token."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


class NormAndRotate(nn.Module):
    """`norm_and_rotate` with a learned gain of `size` numbers; 0: no gain. It is a module because
    accelerate loads offloaded weights when their module is called.
    """

    def __init__(self, size: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size)) if size else None

    def forward(
        self, x: Tensor, heads: int, norm: bool, rotation: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        return norm_and_rotate(x, heads, norm=norm, rotation=rotation, gain=self.gain)


def rotations(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles that rotate a key of `size` numbers at positions (batch or 1,
    tokens): two of (batch or 1, tokens, size / 2) fp32.
    """
    pair = torch.arange(0, size, 2, device=positions.device)  # of a key's numbers
    angles = positions[..., None] * BASE ** (-pair / size)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """y[i] = sum over j <= i of softmax(query[i] . key[j] / sqrt(size)) * value[j] in each head
    (arXiv 1706.03762), over the last `context` tokens. It is KeyedConv with a weight of 1 / (i + 1)
    and no bias.
    """

    module_id: ModuleId = (0, 0)  # set by the model

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.heads = config.num_mixer_heads
        self.key_size = config.mixer_key_size
        self.channels = config.hidden_size
        self.context = config.max_position_embeddings

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, past: MixingCache | None = None
    ) -> Tensor:
        """As KeyedConv.forward."""
        query = by_head(query, self.heads)
        key = by_head(key, self.heads)
        value = by_head(value, self.heads)
        tokens = query.shape[2]
        mask = None
        if past is not None:
            new = torch.cat([key, value], -1)
            keys_values = past.append(self.module_id, new, self.context)
            if not past.is_empty:
                key, value = keys_values.tensor_split([self.key_size], -1)
                mask = past.seen(self.module_id, keys_values, self.context)
        if mask is None and tokens > self.context:
            positions = torch.arange(tokens, device=query.device)[None]
            mask = is_seen(lags_from(positions, tokens), self.context)
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        return y.transpose(1, 2).flatten(2)

    flops = KeyedConv.flops  # which counts the same two products


# The first line whose condition holds for a configuration and the number of a block, from 0 on.
VARIANTS = [
    (lambda c, block: block + 1 in keyed_blocks(c), Keyed),
    (lambda c, block: c.mixer_gate, Gated),
    (lambda c, block: True, Flat),
]


def mixing_class(config: MaskedMixerConfig, block: int) -> type[nn.Module]:
    """The variant in a block."""
    return next(variant for holds, variant in VARIANTS if holds(config, block))


# ------------------------------------------------------------------------- nonlinearities


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU (arXiv 2109.08668)."""
    return F.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), with Phi the normal distribution function (arXiv 1606.08415)."""
    if torch.compiler.is_compiling() and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return short_gelu(x)
    return F.gelu(x)


def short_gelu(x: Tensor) -> Tensor:
    """x Phi(x) in x's dtype and shape, by arithmetic in fp32 that is cheaper than torch's own.

    Compiled for a GPU, torch's form is limited by arithmetic rather than memory: the error function
    is a long polynomial, and the derivative needs an exponential besides. For 16-bit types a
    shorter formula is accurate enough (Abramowitz and Stegun, Handbook of Mathematical Functions,
    7.1.26), and its exponential is the one that the derivative needs. Phi is off by at most 3e-7,
    while the result is rounded to 8 or 11 bits. An infinite x gives NaN, as it may in torch's own
    form. Each operation counts: dev/LOG.md, "GELU in fewer operations".
    """
    x32 = x.float()
    constant = x32.detach()
    # exp(-x^2 / 2): a power of two is one operation, an exponential nine.
    bell = torch.exp2(constant * constant * (-0.5 / math.log(2)))
    denominator = 1 + 0.3275911 / math.sqrt(2) * constant.abs()
    t = torch.rsqrt(denominator * denominator)  # 1 / denominator, cheaper on a GPU than a division
    factor = 0.0
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        factor = t * (coefficient / 2 + factor)
    tail = bell * factor  # Phi(-|x|)
    y = constant.relu() - constant.abs() * tail
    if torch.is_grad_enabled():
        distribution = torch.where(constant < 0, tail, 1 - tail)
        slope = distribution + constant * bell / math.sqrt(2 * math.pi)
        # The added term is zero, and gives y the derivative that we want: autograd's own would
        # compute the polynomial again. An autograd.Function could do the same, but inside of one
        # the compiler of torch 2.11 ignores activation checkpointing. Of a difference the compiler
        # of torch 2.13 makes tests for NaN and infinity, which this sum is spared.
        y = y + slope * (x32 + -constant)
    return y.to(x.dtype)
