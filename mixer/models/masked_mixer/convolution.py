# Copied beside every saved model: it imports from this package only files that are copied too.
"""The convolutions that mix tokens: by a learned lower-triangular weight (arXiv 2409.01482, section
2), in full or by lag, which keyed mixing scales by how well tokens match; or by a recurrence.
"""

import math

import torch
from torch import Tensor, nn
from transformers import initialization

from mixer.ops.plain import (
    by_head,
    diagonal_sums,
    keyed_rows,
    mix_rows,
    rows_at,
    rows_by_lag,
    toeplitz,
    weight_by_lag,
)

from .cache import MixingCache, ModuleId
from .configuration import MaskedMixerConfig

try:  # with kernels where this package is installed, in plain PyTorch elsewhere
    from mixer.ops import keyed_conv, mix_row, triangular_conv
except ModuleNotFoundError as error:
    if error.name not in ("mixer", "mixer.ops"):  # the package is there, but does not work
        raise
    # Beside a saved model this is `from .plain import`: see copy_code in configuration.py.
    from mixer.ops.plain import keyed_conv, mix_row, triangular_conv

# How far back heads look at first with mixing_init shift: those of block b from number b of this
# list on. Every fourth looks at the token before.
LAGS = (1, 2, 3, 4, 1, 6, 8, 12, 1, 2, 16, 24, 1, 4, 32, 64)
SHIFT_NOISE = 0.3  # of the reference's random weights, beside the shift
# Over so many tokens the initial weights of keyed mixing fall to 1/e, by block and head as above.
SPANS = (64, 256, math.inf, 256)
FASTEST = 0.1  # the largest decay of a recurrence; over context / SPAN tokens in longer contexts
SPAN = 512


def pairs_of(tokens: int, window: int) -> int:
    """How many pairs of tokens there are of which one reads the other, as it stands among the last
    `window` up to its own.
    """
    window = min(tokens, window)
    return window * tokens - window * (window - 1) // 2


class TriangularConv(nn.Module):
    """y[i] = bias[i] + sum over j <= i of weight[i, j] * x[j], in each head on its own channels, as
    `mixer.ops.triangular_conv` defines it. With several taps, weight[i, j] is a convolution over
    the channels.

    The parameters are `weight` (heads, taps, context, context), output first, and `bias` (heads,
    context). A subclass may compute the weight from other parameters: see `make_weight`,
    `mixing_weight` and `set_mixing_weight`.
    """

    module_id: ModuleId = (0, 0)  # set by the model

    def __init__(self, config: MaskedMixerConfig, heads: int | None = None):
        """heads: in place of the configuration's."""
        super().__init__()
        self.config = config
        self.heads = heads or config.num_mixer_heads
        self.taps = config.mixer_kernel_size
        self.context = config.max_position_embeddings
        self.channels = config.hidden_size
        self.backend = config.mixing_backend
        self.window = self.mixing_window() or self.context  # how many of the last tokens are mixed
        self.make_weight()
        self.bias = self.make_bias()
        self._draw()

    def mixing_window(self) -> int:
        """How many of the last tokens a token mixes; 0: the whole context."""
        return 0

    def make_weight(self) -> None:
        """Creates the parameters that `mixing_weight` is computed from, with any values."""
        square = (self.heads, self.taps, self.context, self.context)
        self.weight = nn.Parameter(torch.empty(square))

    def make_bias(self) -> nn.Parameter | None:
        return nn.Parameter(torch.empty(self.heads, self.context))

    def mixing_weight(self) -> Tensor:
        """(heads, taps, context, context), output first; the strict upper triangle is not read."""
        return self.weight

    @torch.no_grad()
    def set_mixing_weight(self, weight: Tensor) -> None:
        """Sets the parameters so that they give the lower triangle of `weight`, or nearly."""
        self.weight.copy_(weight.tril())

    def operands(self) -> dict[str, Tensor | None]:
        """The weight as the operators take it: `weight`, or None and `lags`, maybe with `decay`."""
        return {"weight": self.mixing_weight()}

    def rows(self, positions: Tensor, lag: Tensor, inputs: Tensor) -> Tensor:
        """The weight's rows that `mix_rows` and `keyed_rows` need, of tokens at positions, with
        inputs that stand `lag` (batch or 1, new, columns) before them.
        """
        return rows_at(positions, self.mixing_weight(), inputs)

    def kind_of(self, name: str) -> str:
        """The optimizer's kind of a parameter: a field of `mixer.training.optim.Kinds`."""
        return {"weight": "mixing", "lags": "lags"}.get(name, "vectors")

    def flops(self, tokens: int) -> int:
        """FLOPs of one sequence's token mixing, of the triangle alone and inside the window."""
        return 2 * self.channels * self.taps * pairs_of(tokens, self.window)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, past: MixingCache | None = None
    ) -> Tensor:
        """residual + the convolution of x, both (batch, tokens, channels). With a past, x continues
        the past's tokens, and needs only its own rows of the weight.
        """
        operands = self.operands()
        if past is None or past.is_empty:
            if past is not None:
                past.append(self.module_id, by_head(x, self.heads), self.window)
            return triangular_conv(
                x, bias=self.bias, residual=residual, backend=self.backend, **operands
            )
        # Padding, at position -1, has no column that it could be written to.
        if x.shape[1] == 1 and not past.has_padding:
            memory = past.memory_in(self.module_id, x.dtype)
            if operands["weight"] is not None:
                memory = past.extended(memory, 1)
            return mix_row(
                memory,
                x,
                bias=self.bias,
                residual=residual,
                positions=past.positions,
                backend=self.backend,
                **operands,
            )
        # (batch, heads, columns, channels of a head)
        inputs = past.append(self.module_id, by_head(x, self.heads), self.window)
        rows = self.rows(past.positions, past.lags(self.module_id, inputs), inputs)
        return mix_rows(inputs, rows, self.bias, residual, past.positions)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initial weights, with an upper triangle of zeros, by mixing_init: reference, as the
        author's nn.Conv1d(context, context, taps); zero, so that no token gets noise from others
        before there is something to learn from them; shift, see `_shifts`.
        """
        self._draw()
        weights = [weight for weight in self.parameters(recurse=False) if weight is not self.bias]
        # transformers calls this for loaded weights too, which must not change, and for those that
        # it leaves on a disk.
        for weight in weights:
            if weight.is_meta or getattr(weight, "_is_hf_initialized", False):
                return
        self._start()

    def _draw(self) -> None:
        bound = 1 / math.sqrt(self.window * self.taps)
        for parameter in self.parameters(recurse=False):
            if self.config.kaiming_init:
                initialization.normal_(parameter, std=math.sqrt(2) * bound)
            else:
                initialization.uniform_(parameter, -bound, bound)
        if self.config.kaiming_init and self.bias is not None:
            initialization.zeros_(self.bias)

    def _start(self) -> None:
        """Turns drawn weights into those that mixing_init asks for."""
        weight = self.mixing_weight().tril()
        if self.config.mixing_init == "zero":
            weight.zero_()
        if self.config.mixing_init == "shift":
            weight = self._shifted(weight)
        self.set_mixing_weight(weight)

    def _shifted(self, weight: Tensor) -> Tensor:
        return weight * SHIFT_NOISE + toeplitz(self._shifts(), self.context)

    def _shifts(self) -> Tensor:
        """By lag, (heads, taps, window): a head passes on the token LAGS[block + head] before, or
        the window's last, by the tap that looks at the same channel.
        """
        block, _ = self.module_id
        device = next(self.parameters()).device
        lags = torch.zeros(self.heads, self.taps, self.window, device=device)
        for head in range(self.heads):
            lag = LAGS[(block + head) % len(LAGS)]
            lags[head, (self.taps - 1) // 2, min(lag, self.window - 1)] = 1.0
        return lags


class KeyedConv(TriangularConv):
    """A triangular convolution whose weights are scaled by how well a token's query matches other
    tokens' keys, as `mixer.ops.keyed_conv` defines it.
    """

    bias: nn.Parameter

    def __init__(self, config: MaskedMixerConfig):
        super().__init__(config)
        self.key_size = config.mixer_key_size  # n

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, past: MixingCache | None = None
    ) -> Tensor:
        """query, key (batch, tokens, heads * key_size), value (batch, tokens, channels)."""
        if past is not None:
            # (batch, heads, new, key_size + channels of a head)
            new = torch.cat([by_head(key, self.heads), by_head(value, self.heads)], -1)
            keys_values = past.append(self.module_id, new, self.context)
            if not past.is_empty:
                lag = past.lags(self.module_id, keys_values)
                rows = self.rows(past.positions, lag, keys_values)
                query = by_head(query, self.heads)
                return keyed_rows(query, keys_values, rows, self.bias, past.positions, lag)
        operands = self.operands()
        return keyed_conv(query, key, value, bias=self.bias, backend=self.backend, **operands)

    def _shifted(self, weight: Tensor) -> Tensor:
        return weight_by_lag(torch.zeros_like(weight[..., 0]), self._decays(), self.context)

    def _decays(self) -> Tensor:
        """Instead of shifts, (heads,): weights fall by exp(-lag * decay), and a token's weights add
        up to 1. While all keys match equally, a head is thus a mean of earlier tokens.
        """
        block, _ = self.module_id
        spans = [SPANS[(block + head) % len(SPANS)] for head in range(self.heads)]
        return 1 / torch.tensor(spans, device=self.bias.device)

    def flops(self, tokens: int) -> int:
        """A product of query and key, and one of how they fit and the value."""
        pairs = pairs_of(tokens, self.context)
        return 2 * (self.heads * self.key_size + self.channels) * pairs


class LagConv(TriangularConv):
    """A TriangularConv whose parameters are `lags` (heads, taps, window) and `bias`. Texts may have
    any length; each token mixes the last `window` tokens: mixing_window, or the context. With a
    mixing_window there is no bias, so nothing depends on the context.
    """

    decay: Tensor | None

    def mixing_window(self) -> int:
        return self.config.mixing_window

    def make_weight(self) -> None:
        self.lags = nn.Parameter(torch.empty(self.heads, self.taps, self.window))
        self.register_buffer("decay", None)

    def make_bias(self) -> nn.Parameter | None:
        return None if self.mixing_window() else super().make_bias()

    def mixing_weight(self) -> Tensor:
        return weight_by_lag(self.lags, self.decay, self.context)

    @torch.no_grad()
    def set_mixing_weight(self, weight: Tensor) -> None:
        self.lags.zero_()
        numbers = torch.arange(self.context, 0, -1, device=weight.device)  # on each diagonal
        means = diagonal_sums(weight - self.mixing_weight()) / numbers
        self.lags.copy_(means[..., : self.window])

    def operands(self) -> dict[str, Tensor | None]:
        return {"weight": None, "lags": self.lags}

    def rows(self, positions: Tensor, lag: Tensor, inputs: Tensor) -> Tensor:
        return rows_by_lag(self.lags, self.decay, positions, lag).to(inputs.dtype)

    def _start(self) -> None:
        if self.config.mixing_init == "zero":
            self.lags.zero_()
        if self.config.mixing_init == "shift":
            self.lags.mul_(SHIFT_NOISE).add_(self._shifts())


class KeyedLagConv(LagConv, KeyedConv):
    """A KeyedConv with `lags` (heads, 1, context). They are added to a head's initial weights: a
    mean of earlier tokens by `decay` (heads,), which is not trained. It has no window but the
    context: mixing_window is of the blocks between.
    """

    def mixing_window(self) -> int:
        return 0

    def make_weight(self) -> None:
        super().make_weight()
        self.decay = torch.zeros(self.heads)

    def operands(self) -> dict[str, Tensor | None]:
        return {"weight": None, "lags": self.lags, "decay": self.decay}

    def _start(self) -> None:
        self.lags.zero_()
        assert self.decay is not None
        self.decay.copy_(self._decays())


class RecurrentConv(TriangularConv):
    """A triangular convolution by a running sum, s[i] = d s[i - 1] + x[i] (arXiv 2605.08696).
    Generation keeps only this sum, however long the text. A head by row returns scale[i] s[i], a
    head by column sums scale[j] x[j]: W[i, j] is scale[i] d^(i - j), or scale[j] d^(i - j).

    The parameters are `scale` (heads, 1, context), `bias` (heads, context) and, if the
    configuration has mixing_decay, `decay` (heads,): 1 - d^span, because half precision has few
    numbers just below 1. Tokens past the context use the last position's scale and bias.
    """

    bias: nn.Parameter

    def make_weight(self) -> None:
        # So many heads go by row, the others by column.
        by_row = {"rows": self.heads, "mixed": self.heads // 2, "columns": 0}
        self.by_row = by_row[self.config.mixing_weight]
        self.span = max(1, self.context // SPAN)
        self.scale = nn.Parameter(torch.empty(self.heads, 1, self.context))
        self.decay = nn.Parameter(torch.empty(self.heads)) if self.config.mixing_decay else None

    def mixing_weight(self) -> Tensor:
        input_scale, output_scale = self._scales(self.scale[:, 0].T)
        powers = toeplitz(self._powers(0, self.context), self.context)
        return (output_scale.T[..., None] * powers * input_scale.T[:, None])[:, None]

    def _scales(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """What scales a token before it is summed up, and the sum after, of scale (..., heads)."""
        by_row = torch.arange(self.heads, device=scale.device) < self.by_row
        return torch.where(by_row, 1, scale), torch.where(by_row, scale, 1)

    def _draw(self) -> None:
        """Variance 2 / context, as the author has it, no decay and no bias."""
        for parameter in self.parameters(recurse=False):
            initialization.zeros_(parameter)
        if self.config.mixing_init == "reference":
            initialization.normal_(self.scale, std=math.sqrt(2 / self.context))

    def _start(self) -> None:
        """Nothing more: they start as they are drawn."""

    def forward(
        self, x: Tensor, residual: Tensor | None = None, past: MixingCache | None = None
    ) -> Tensor:
        """As TriangularConv.forward, of texts of any length. Padding, whose position is negative,
        does not change the sum that is kept.
        """
        scale, bias = (self._at(n, x, past).to(x.dtype) for n in (self.scale[:, 0], self.bias))
        # (batch or 1, tokens, heads, 1) each
        input_scale, output_scale = (s[..., None] for s in self._scales(scale))
        x = (x.unflatten(-1, (self.heads, -1)) * input_scale).flatten(2)
        if past is None:
            sums = self._sums(x)
        else:
            sum_dtype = torch.promote_types(x.dtype, torch.float32)
            state = past.memory(self.module_id, (x.shape[0], x.shape[2]), x, sum_dtype)
            # The backward pass may need what it was.
            sums = self._sums(x, state.clone() if torch.is_grad_enabled() else state)
            state.copy_(past.last_of_texts(sums, state))
        sums = sums.to(x.dtype).unflatten(-1, (self.heads, -1))
        y = (sums * output_scale + bias[..., None]).flatten(2)
        return y if residual is None else residual + y.to(residual.dtype)

    def _at(self, numbers: Tensor, x: Tensor, past: MixingCache | None) -> Tensor:
        """Numbers (heads, context) at the tokens of x, (batch or 1, tokens, heads)."""
        if past is not None:
            return numbers.T[past.clamped(self.context - 1)]
        repeated = numbers[:, -1:].expand(-1, max(0, x.shape[1] - self.context))
        return torch.cat([numbers[:, : x.shape[1]], repeated], 1).T[None]

    def _powers(self, first: int, end: int) -> Tensor:
        """d^k for k from first to end - 1: (heads, end - first), fp32 or wider."""
        decay = self.scale.new_zeros(self.heads) if self.decay is None else self.decay
        decay = decay.to(torch.promote_types(decay.dtype, torch.float32)).clamp(0, FASTEST)
        exponent = torch.arange(first, end, device=decay.device)
        return (exponent * torch.log1p(-decay)[:, None] / self.span).exp()

    def _sums(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """s[i] = d s[i - 1] + x[i] of x (batch, tokens, channels), where s[-1] is a state (batch,
        channels) or zero. Texts longer than the context are summed up one context after another.
        """
        chunks = []
        for sums in x.split(self.context, 1):
            tokens = sums.shape[1]
            if tokens > 1:
                lags = self._powers(0, tokens)[:, None]
                sums = triangular_conv(sums, None, None, None, backend=self.backend, lags=lags)
            if state is not None:
                fallen = self._powers(1, tokens + 1).T[..., None]  # (tokens, heads, 1)
                earlier = state.unflatten(-1, (self.heads, -1))[:, None] * fallen
                sums = sums + earlier.flatten(2)
            state = sums[:, -1]
            chunks.append(sums)
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)

    def flops(self, tokens: int) -> int:
        """For each channel, products by d and by the scale."""
        return 2 * self.channels * 2 * tokens
