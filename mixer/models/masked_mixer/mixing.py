"""Token mixing: what a masked mixer has in place of attention (arXiv 2409.01482, section 2).

`TriangularConv` mixes the tokens by a learned lower-triangular weight. A `TokenMixing` is what a
block calls; the variants below are built around one or two convolutions, and `VARIANTS` chooses
between them. A new variant is one class here, a line in VARIANTS and a field of MixerOptions in
configuration.py.

This file is copied beside every saved model. It uses the kernels of this package where they are
installed, and plain PyTorch elsewhere.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import initialization

from .configuration import MaskedMixerConfig
from .flops import Flops
from .gelu import gelu
from .linear import Linear
from .memory import MixingMemory
from .plain import (
    by_head,
    dense,
    keyed,
    keyed_rows,
    mix_row,
    mix_rows,
    panel_bounds,
    products_per_triangle,
    staircase,
    write_rows,
)

try:
    from mixer.ops import mix_row, triangular_conv  # with the kernels, where they can run
except ImportError:  # loaded with trust_remote_code where this package is not installed

    def triangular_conv(
        x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, backend: str
    ) -> Tensor:
        """The masked-weight matmul, whichever backend is asked for."""
        return dense(x, weight, bias, residual)


try:
    from mixer.ops import keyed_conv
except ImportError:  # or where this package is older

    def keyed_conv(
        query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor, backend: str
    ) -> Tensor:
        """Keyed mixing in plain PyTorch, whichever backend is asked for."""
        return keyed(query, key, value, weight, bias)


# What a convolution keeps of earlier tokens: nothing, a MixingMemory that counts its tokens, or the
# bare tensor of one whose tokens are counted elsewhere (in a captured decoding step).
Memory = MixingMemory | Tensor | None

# Of the initial weights "shift": how far back the heads of a block look, block after block from
# another place in this list on. Every fourth of them looks at the token before.
LAGS = (1, 2, 3, 4, 1, 6, 8, 12, 1, 2, 16, 24, 1, 4, 32, 64)
SHIFT_NOISE = 0.3  # of the reference's random weights, beside the shift
# And over how many tokens the weights of keyed mixing fall to 1/e, block after block likewise.
SPANS = (64, 256, math.inf, 256)


class TriangularConv(nn.Module):
    """One triangular convolution: a mixing weight, a bias, and the backend that computes it.

    The parameters are `weight` (heads, taps, context, context), out then in, and `bias` (heads,
    context). `mixer.ops.triangular_conv` defines the result. It has the configuration's heads and
    channels; `heads` gives it another number of heads.
    """

    def __init__(self, config: MaskedMixerConfig, heads: int | None = None):
        super().__init__()
        self.heads, self.taps = heads or config.num_mixer_heads, config.mixer_kernel_size
        self.context, self.channels = config.max_position_embeddings, config.hidden_size
        self.weight = nn.Parameter(torch.empty(self.heads, self.taps, self.context, self.context))
        self.bias = nn.Parameter(torch.empty(self.heads, self.context))
        self.backend, self.initial = config.mixing_backend, config.mixing_init
        self.block = 0  # the number of the block that it stands in, which the model sets
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initial weights, with the upper triangle zero, which is never read and never changes.

        reference: those of nn.Conv1d(context, context, taps), as the reference implementation has
        them. zero: none, so that no token gets noise from others before there is something to
        learn from them. shift: 0.3 times the reference's, and on one diagonal of each head 1, so
        that a head starts by passing on the token that stands LAGS[block + head] places back.
        The bias is the reference's in all of them.
        """
        bound = 1 / math.sqrt(self.context * self.taps)
        initialization.uniform_(self.weight, -bound, bound)
        initialization.uniform_(self.bias, -bound, bound)
        loaded = getattr(self.weight, "_is_hf_initialized", False)
        if not loaded:  # transformers calls this for loaded weights too, which must not change
            self.weight.tril_()
            if self.initial == "zero":
                self.weight.zero_()
            if self.initial == "shift":
                self._set_shifts()

    def _set_shifts(self) -> None:
        self.weight.mul_(SHIFT_NOISE)
        for head in range(self.heads):
            lag = min(LAGS[(self.block + head) % len(LAGS)], self.context - 1)
            middle = (self.taps - 1) // 2  # the tap that looks at the same channel
            self.weight[head, middle].diagonal(-lag).add_(1.0)

    def mixing_weight(self) -> Tensor:
        """The weight that tokens are mixed with, (heads, taps, context, context), out then in.

        Nothing else reads the parameter, so another parametrisation is a change of this method and
        of `set_mixing_weight`. What stands in the strictly upper triangle has no meaning.
        """
        return self.weight

    @torch.no_grad()
    def set_mixing_weight(self, weight: Tensor) -> None:
        """Sets the parameters so that `mixing_weight` returns the lower triangle of `weight`."""
        self.weight.copy_(weight.tril())

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        memory: Memory = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """residual + the convolution of x, both (batch, tokens, channels).

        Without a memory, x holds whole texts. With one, x continues the tokens in it: the first
        tokens go through the whole operation, and later ones need only their own rows of the
        weight. `positions` (batch or 1, tokens) int64 says where they stand.
        """
        weight = self.mixing_weight()
        if isinstance(memory, Tensor):  # one new token of each text
            return mix_row(memory, x, weight, self.bias, residual, positions, self.backend)
        first = memory is None or memory.get_seq_length() == 0
        if not first and x.shape[1] == 1:
            past = memory.extend(1)
            return mix_row(past, x, weight, self.bias, residual, positions, self.backend)
        if memory is not None:
            # (batch, heads, new, channels of a head)
            parts = by_head(x, self.heads)
            past, _ = memory.update(parts, positions=positions)
        if first:
            return triangular_conv(x, weight, self.bias, residual, backend=self.backend)
        y = mix_rows(past, weight, self.bias, positions)
        # Under autocast the residual stream has the autocast type, as y has.
        return y if residual is None else y + residual.to(y.dtype)

    def flops(self, tokens: int) -> Flops:
        """Of one sequence. `executed` counts what the backend multiplies, "auto" as "cuda"."""
        each = 2 * self.channels * self.taps  # for one pair of tokens
        useful = each * tokens * (tokens + 1) // 2
        executed = each * products_per_triangle(tokens, self.backend)
        return Flops(useful, executed, token_mixing=useful)


class KeyedConv(TriangularConv):
    """A triangular convolution whose weights are scaled by how well tokens fit: y[i] = bias[i] +
    sum over j <= i of weight[i, j] * f[i, j] * value[j] in each head. f[i, j] is exp(s[i, j]) over
    its mean of all j <= i, and s[i, j] is query[i] . key[j] / sqrt(n).

    Where all fit alike, f is 1, and this is a triangular convolution. Without the weight it is
    attention (arXiv 1706.03762), multiplied by the number of tokens that the query sees.
    `mixer.ops.keyed_conv` defines the result.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__(config)
        self.key_size = config.mixer_key_size  # n

    def _set_shifts(self) -> None:
        """In place of shifts, weights that fall with the distance: exp(-lag / SPANS[block + head]),
        those of a token adding up to 1, as those of attention do. While all keys fit alike, a head
        starts as a mean of earlier tokens, of all of them where the span is infinite.
        """
        lags = torch.arange(self.context, device=self.weight.device)
        lag = (lags[:, None] - lags).clamp(min=0)
        for head in range(self.heads):
            falling = (-lag / SPANS[(self.block + head) % len(SPANS)]).exp().tril()
            self.weight[head, 0] = falling / falling.sum(-1, keepdim=True)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, memory: Memory, positions: Tensor | None
    ) -> Tensor:
        """query and key are (batch, tokens, heads * key_size), value and the result (batch, tokens,
        channels); memory and positions are those of TriangularConv.
        """
        weight = self.mixing_weight()
        first = memory is None
        if memory is not None:
            # (batch, heads, new, key_size + channels of a head)
            new = torch.cat([by_head(key, self.heads), by_head(value, self.heads)], -1)
            if isinstance(memory, Tensor):  # one new token of each text
                write_rows(memory, new, positions)
                past = memory
            else:
                first = memory.get_seq_length() == 0
                past, _ = memory.update(new, positions=positions)
        if first:
            return keyed_conv(query, key, value, weight, self.bias, backend=self.backend)
        return keyed_rows(by_head(query, self.heads), past, weight, self.bias, positions)

    def flops(self, tokens: int) -> Flops:
        """Of one sequence: a product of query and key, and one of how they fit and the value.

        `executed` is a third of what forward and backward multiply. The kernels' three backward
        passes compute the products of queries and keys again, and all of those of dy and values;
        one of them adds up keys by how they fit, too.
        """
        keys = self.heads * self.key_size
        pairs = tokens * (tokens + 1) // 2
        useful = 2 * (keys + self.channels) * pairs
        executed = 2 * (keys + self.channels) * staircase(panel_bounds(tokens))
        if self.backend == "cuda":
            products = 7 * keys + 5 * self.channels
            executed = 2 * products * products_per_triangle(tokens, "cuda") // 3
        return Flops(useful, executed, token_mixing=useful)


class TokenMixing(nn.Module):
    """residual + mix(x): what a block calls to mix its tokens. A variant of it defines `mix`.

    A variant with other than one convolution says how many in `convolutions`: generation keeps a
    memory for each.
    """

    convolutions = 1

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        memories: Sequence[Memory] = (),
        positions: Tensor | None = None,
    ) -> Tensor:
        """x, residual and the result are (batch, tokens, channels); `memories` has one for each
        convolution, or none; `positions` are those of TriangularConv.
        """
        memories = memories or (None,) * self.convolutions
        if torch.compiler.is_compiling():
            named = nullcontext()  # compiled code has no named ranges
        else:  # so that any profile shows the time spent here, whichever backend runs
            named = torch.profiler.record_function("token_mixing")
        with named:
            return self.mix(x, residual, memories, positions)

    def mix(
        self, x: Tensor, residual: Tensor, memories: Sequence[Memory], positions: Tensor | None
    ) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define mix()")


class Flat(TokenMixing):
    """One triangular convolution: with one head the paper's flat mixer; with several heads, each
    mixes its own channels, and nothing but the MLP connects the heads. Between blocks of keyed
    mixing it has one head.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.conv = TriangularConv(config, heads=1 if config.mixer_key_size else None)

    def mix(self, x, residual, memories, positions):
        return self.conv(x, residual, memories[0], positions)


class Expanded(TokenMixing):
    """Two triangular convolutions with a GELU between."""

    convolutions = 2

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.conv = TriangularConv(config)
        self.second_conv = TriangularConv(config)

    def mix(self, x, residual, memories, positions):
        x = gelu(self.conv(x, None, memories[0], positions))
        return self.second_conv(x, residual, memories[1], positions)


class Projected(TokenMixing):
    """A convolution of each head's channels, between an in-projection and an out-projection.

    in_proj holds the projections of all heads: its outputs are laid out head after head.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.in_proj = Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)
        self.conv = TriangularConv(config)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)

    def mix(self, x, residual, memories, positions):
        x = self.conv(self.in_proj(x), None, memories[0], positions)
        return residual + self.out_proj(x)


class ProjectedExpanded(TokenMixing):
    """Projected, with two convolutions of each head and a GELU between."""

    convolutions = 2

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        self.in_proj = Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)
        self.conv = TriangularConv(config)
        self.second_conv = TriangularConv(config)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)

    def mix(self, x, residual, memories, positions):
        x = gelu(self.conv(self.in_proj(x), None, memories[0], positions))
        x = self.second_conv(x, None, memories[1], positions)
        return residual + self.out_proj(x)


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
        self.conv = TriangularConv(config)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)

    def mix(self, x, residual, memories, positions):
        query, key, value = self.in_proj(x).chunk(3, dim=-1)
        mixed = self.conv(key * value, None, memories[0], positions)
        return residual + self.out_proj(query * mixed)


class Keyed(TokenMixing):
    """out_proj(mixed values), where a KeyedConv mixes them by queries and keys, all three
    projections of x: so a token finds earlier ones by what they are, and not by distance alone.

    in_proj holds the projections: queries, keys, values, each laid out head after head.
    """

    def __init__(self, config: MaskedMixerConfig):
        super().__init__()
        keys = config.num_mixer_heads * config.mixer_key_size
        self.parts = [keys, keys, config.hidden_size]
        self.in_proj = Linear(config.hidden_size, *self.parts, bias=config.linear_bias)
        # Not `conv`: so checkpoints of an earlier keyed mixing, another function, lack its weights.
        self.keyed_conv = KeyedConv(config)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=config.linear_bias)

    def mix(self, x, residual, memories, positions):
        query, key, value = self.in_proj(x).split(self.parts, dim=-1)
        return residual + self.out_proj(self.keyed_conv(query, key, value, memories[0], positions))


def has_projections(config: MaskedMixerConfig) -> bool:
    """Whether mixing stands between an in-projection and an out-projection; never for one head."""
    return config.num_mixer_heads > 1 and config.mixer_projections


# Which configurations have which variant: the first line whose condition holds decides.
Condition = Callable[[MaskedMixerConfig], bool]
VARIANTS: list[tuple[Condition, type[TokenMixing]]] = [
    (lambda config: config.mixer_key_size > 0, Keyed),
    (lambda config: config.mixer_gate, Gated),
    (lambda config: has_projections(config) and config.mixer_expansion, ProjectedExpanded),
    (lambda config: has_projections(config), Projected),
    (lambda config: config.mixer_expansion, Expanded),
    (lambda config: True, Flat),
]


def mixing_class(config: MaskedMixerConfig, block: int) -> type[TokenMixing]:
    """The variant of token mixing that a configuration asks for in a block."""
    chosen = next(variant for condition, variant in VARIANTS if condition(config))
    if chosen is Keyed and (block + 1) % config.mixer_keyed_every:
        return Gated if config.mixer_gate else Flat
    return chosen
