"""The convolutions that mix tokens: `TriangularConv`, by a learned lower-triangular weight (arXiv
2409.01482, section 2), and `KeyedConv`, whose weights are scaled by how well tokens fit.

This file is copied beside every saved model. It uses the kernels of this package where they are
installed, and plain PyTorch elsewhere.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization

from .configuration import RECURRENT, MaskedMixerConfig
from .flops import Flops
from .lags import diagonal_sums, falling, lags_at, toeplitz, weight_by_lag
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
    rows_at,
    staircase,
    write_rows,
)

try:  # with the kernels, where they can run
    from mixer.ops import keyed_conv, mix_row, triangular_conv
except ModuleNotFoundError as error:
    if error.name not in ("mixer", "mixer.ops"):  # the package is there, but does not work
        raise
    # loaded with trust_remote_code where this package is not installed

    def triangular_conv(
        x: Tensor, weight: Tensor | None, bias: Tensor, residual: Tensor | None, backend: str, lags
    ) -> Tensor:
        """The masked-weight matmul, whichever backend is asked for."""
        return dense(x, weight, bias, residual, lags)

    def keyed_conv(
        query: Tensor, key: Tensor, value: Tensor, weight, bias: Tensor, lags, decay, backend: str
    ) -> Tensor:
        """Keyed mixing in plain PyTorch, whichever backend is asked for."""
        if lags is not None:
            weight = weight_by_lag(lags, decay, query.shape[1])
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

    The parameters are `weight` (heads, taps, context, context), out then in, or `lags` (heads,
    taps, context) in its place, and `bias` (heads, context). `mixer.ops.triangular_conv` defines
    the result. It has the configuration's heads and channels; `heads` gives it another number of
    heads.

    A subclass may compute the weight from other parameters: see `make_weight`, `mixing_weight` and
    `set_mixing_weight`.
    """

    def __init__(self, config: MaskedMixerConfig, heads: int | None = None):
        super().__init__()
        self.heads, self.taps = heads or config.num_mixer_heads, config.mixer_kernel_size
        self.context, self.channels = config.max_position_embeddings, config.hidden_size
        self.backend, self.initial = config.mixing_backend, config.mixing_init
        self.form, self.has_decay = config.mixing_weight, config.mixing_decay
        self.by_lag = self.form == "lags"
        self.kaiming = config.kaiming_init
        self.block = 0  # the number of the block that it stands in, which the model sets
        self.make_weight()
        self.bias = nn.Parameter(torch.empty(self.heads, self.context))
        self._draw()

    def make_weight(self) -> None:
        """Creates the parameters that `mixing_weight` is computed from, with any values."""
        if self.form in RECURRENT:
            raise ValueError(f"mixing_weight is {self.form}; use mixing.convolution(config) for it")
        if self.by_lag:
            self.lags = nn.Parameter(torch.empty(self.heads, self.taps, self.context))
        else:
            square = (self.heads, self.taps, self.context, self.context)
            self.weight = nn.Parameter(torch.empty(square))

    def mixing_weight(self) -> Tensor:
        """The weight that tokens are mixed with, (heads, taps, context, context), out then in. What
        stands in the strictly upper triangle has no meaning.
        """
        return toeplitz(self.lags, self.context) if self.by_lag else self.weight

    def rows_at(self, positions: Tensor, memory: Tensor) -> Tensor:
        """The weight's rows that `mix_rows` needs, without the rest of it where it is by lag."""
        if not self.by_lag:
            return rows_at(positions, self.mixing_weight(), memory)
        # (batch or 1, new, length)
        lag = positions[..., None] - torch.arange(memory.shape[2], device=memory.device)
        return lags_at(self.lags, lag).to(memory.dtype).permute(2, 0, 1, 3, 4)

    @torch.no_grad()
    def set_mixing_weight(self, weight: Tensor) -> None:
        """Sets the parameters so that `mixing_weight` returns the lower triangle of `weight`, or
        what comes nearest.
        """
        if self.by_lag:
            numbers = torch.arange(self.context, 0, -1, device=weight.device)  # on each diagonal
            self.lags.copy_(diagonal_sums(weight)[0] / numbers)
        else:
            self.weight.copy_(weight.tril())

    @torch.no_grad()
    def extend(self, context: int) -> None:
        """Gives a weight by lag more tokens: further lags are zero, further biases the last."""
        more = context - self.context
        self.lags = nn.Parameter(F.pad(self.lags, (0, more)))
        last = self.bias[:, -1:].expand(-1, more)
        self.bias = nn.Parameter(torch.cat([self.bias, last], -1))
        self.context = context

    def kind_of(self, name: str) -> str:
        """What the optimizer takes a parameter for, a field of `mixer.training.optim.Kinds`."""
        return {"weight": "mixing", "bias": "vectors"}.get(name, "lags")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initial weights, with the upper triangle zero, which is never read and never changes.

        reference: those of nn.Conv1d(context, context, taps), as the reference implementation has
        them. zero: none, so that no token gets noise from others before there is something to
        learn from them. shift: see `_shifted`. The bias is the reference's in all of them.
        """
        self._draw()
        own = [part for name, part in self.named_parameters(recurse=False) if name != "bias"]
        if any(getattr(part, "_is_hf_initialized", False) for part in own):
            return  # transformers calls this for loaded weights too, which must not change
        if self.by_lag:
            self._reset_lags()
            return
        weight = self.mixing_weight().tril()
        if self.initial == "zero":
            weight.zero_()
        if self.initial == "shift":
            weight = self._shifted(weight)
        self.set_mixing_weight(weight)

    def _draw(self) -> None:
        bound = 1 / math.sqrt(self.context * self.taps)
        for parameter in self.parameters(recurse=False):
            if self.kaiming:
                initialization.normal_(parameter, std=math.sqrt(2) * bound)
            else:
                initialization.uniform_(parameter, -bound, bound)
        if self.kaiming:
            initialization.zeros_(self.bias)

    def _reset_lags(self) -> None:
        """As the weight: drawn numbers, none, or 0.3 times these and a 1 for each head."""
        if self.initial == "zero":
            self.lags.zero_()
        if self.initial == "shift":
            self.lags.mul_(SHIFT_NOISE)
            for head in range(self.heads):
                self.lags[head, (self.taps - 1) // 2, self._shift_of(head)] += 1.0

    def _shift_of(self, head: int) -> int:
        return min(LAGS[(self.block + head) % len(LAGS)], self.context - 1)

    def _shifted(self, weight: Tensor) -> Tensor:
        """0.3 times the reference's, and on one diagonal of each head 1, so that a head starts by
        passing on the token that stands LAGS[block + head] positions back.
        """
        weight = weight * SHIFT_NOISE
        for head in range(self.heads):
            middle = (self.taps - 1) // 2  # the tap that looks at the same channel
            weight[head, middle].diagonal(-self._shift_of(head)).add_(1.0)
        return weight

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
        captured = isinstance(memory, Tensor)  # one new token of each text, in a graph
        first = memory is None or not captured and memory.get_seq_length() == 0
        if not first and x.shape[1] == 1 and not self.by_lag:  # by one kernel
            past, weight = memory if captured else memory.extend(1), self.mixing_weight()
            return mix_row(past, x, weight, self.bias, residual, positions, self.backend)
        # (batch, heads, length, channels of a head)
        if memory is not None:
            past = remember(memory, by_head(x, self.heads), positions)
        if first:
            weight, lags = self._given()
            return triangular_conv(x, weight, self.bias, residual, backend=self.backend, lags=lags)
        y = mix_rows(past, self.rows_at(positions, past), self.bias, positions)
        # Under autocast the residual stream has the autocast type, as y has.
        return y if residual is None else y + residual.to(y.dtype)

    def _given(self) -> tuple[Tensor | None, Tensor | None]:
        """What an operator takes: a weight or lags, and None for the other."""
        return (None, self.lags) if self.by_lag else (self.mixing_weight(), None)

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
        # By lag, what a head's weights start from is kept, and lags are added to it.
        self.register_buffer("decay", torch.zeros(self.heads) if self.by_lag else None)

    def mixing_weight(self) -> Tensor:
        return weight_by_lag(self.lags, self.decay, self.context) if self.by_lag else self.weight

    def rows_at(self, positions: Tensor, memory: Tensor) -> Tensor:
        rows = super().rows_at(positions, memory)
        if not self.by_lag:
            return rows
        by_lag, sums = falling(self.decay, self.context)
        lag = positions[..., None] - torch.arange(memory.shape[2], device=memory.device)
        # (heads, batch or 1, new, length)
        start = lags_at(by_lag, lag) / sums[:, positions][..., None]
        return rows + start.to(memory.dtype).permute(1, 0, 2, 3)[:, :, None]

    @torch.no_grad()
    def set_mixing_weight(self, weight: Tensor) -> None:
        if self.by_lag:
            self.lags.zero_()
            weight = weight - self.mixing_weight()
        super().set_mixing_weight(weight)

    def _reset_lags(self) -> None:
        """None beside the means of earlier tokens that a full weight starts from."""
        self.lags.zero_()
        for head in range(self.heads):
            self.decay[head] = 1 / SPANS[(self.block + head) % len(SPANS)]

    def _shifted(self, weight: Tensor) -> Tensor:
        """In place of shifts, weights that fall with the distance: exp(-lag / SPANS[block + head]),
        those of a token adding up to 1, as those of attention do. While all keys fit alike, a head
        starts as a mean of earlier tokens, of all of them where the span is infinite.
        """
        lags = torch.arange(self.context, device=weight.device)
        lag = (lags[:, None] - lags).clamp(min=0)
        for head in range(self.heads):
            falling = (-lag / SPANS[(self.block + head) % len(SPANS)]).exp().tril()
            weight[head, 0] = falling / falling.sum(-1, keepdim=True)
        return weight

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, memory: Memory, positions: Tensor | None
    ) -> Tensor:
        """query and key are (batch, tokens, heads * key_size), value and the result (batch, tokens,
        channels); memory and positions are those of TriangularConv.
        """
        captured = isinstance(memory, Tensor)
        first = memory is None or not captured and memory.get_seq_length() == 0
        if memory is not None:
            # (batch, heads, new, key_size + channels of a head)
            new = torch.cat([by_head(key, self.heads), by_head(value, self.heads)], -1)
            past = remember(memory, new, positions)
        if first:
            weight, lags = self._given()
            about = {"lags": lags, "decay": self.decay, "backend": self.backend}
            return keyed_conv(query, key, value, weight, self.bias, **about)
        rows = self.rows_at(positions, past)
        return keyed_rows(by_head(query, self.heads), past, rows, self.bias, positions)

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


def remember(memory: MixingMemory | Tensor, new: Tensor, positions: Tensor | None) -> Tensor:
    """Writes the inputs of new tokens, (batch, heads, new, channels of a head), into a memory;
    returns those of all tokens so far, (batch, heads, length, channels of a head).
    """
    if isinstance(memory, MixingMemory):
        return memory.update(new, positions=positions)[0]
    write_rows(memory, new, positions)
    return memory
