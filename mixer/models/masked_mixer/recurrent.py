"""Mixing weights that are a recurrence (arXiv 2605.08696): W[i, j] = scale[i] d^(i - j) by row, or
scale[j] d^(i - j) by column. Later tokens need no more of earlier ones than a running sum, so
generation keeps one number for each channel, however long the text.
"""

import math

import torch
from torch import Tensor, nn
from transformers import initialization

from mixer.ops.lags import toeplitz

from .cache import MixingCache
from .convolution import TriangularConv, triangular_conv

FASTEST = 0.1  # the largest decay
SPAN = 512  # In longer contexts, a decay is spread over context / 512 tokens.


class RecurrentConv(TriangularConv):
    """A triangular convolution by a running sum, s[i] = d s[i - 1] + x[i]. A head by row returns
    scale[i] s[i]; a head by column sums up scale[j] x[j].

    The parameters are `scale` (heads, 1, context), `bias` (heads, context) and, if the
    configuration has mixing_decay, `decay` (heads,): 1 - d^span, because half precision has few
    numbers just below 1. Tokens beyond the context have the scale and the bias of its last one.
    """

    def make_weight(self) -> None:
        # So many heads go by row, the others by column.
        by_row = {"rows": self.heads, "mixed": self.heads // 2, "columns": 0}
        self.by_row = by_row[self.config.mixing_weight]
        self.span = max(1, self.context // SPAN)
        self.scale = nn.Parameter(torch.empty(self.heads, 1, self.context))
        self.decay = nn.Parameter(torch.empty(self.heads)) if self.config.mixing_decay else None

    def mixing_weight(self) -> Tensor:
        given, taken = self._sides()
        powers = toeplitz(self._powers(0, self.context), self.context)
        return (taken[..., None] * powers * given[:, None])[:, None]

    def _sides(self) -> tuple[Tensor, Tensor]:
        """What scales a token before it is summed up, and the sum after: (heads, context) each."""
        scale = self.scale[:, 0]
        by_row = torch.arange(self.heads, device=scale.device)[:, None] < self.by_row
        return torch.where(by_row, 1, scale), torch.where(by_row, scale, 1)

    def reset_parameters(self) -> None:
        """As the author has them: variance 2 / context, no decay, no bias."""
        self._draw()

    def _draw(self) -> None:
        for parameter in self.parameters(recurse=False):
            initialization.zeros_(parameter)
        if self.config.mixing_init == "reference":
            initialization.normal_(self.scale, std=math.sqrt(2 / self.context))

    def forward(
        self, x: Tensor, residual: Tensor | None = None, past: MixingCache | None = None
    ) -> Tensor:
        """As TriangularConv.forward, of texts of any length. Padding, whose position is negative,
        does not change the sum that is kept.
        """
        # (batch or 1, tokens, heads, 1) each
        given, taken, bias = (
            self._at(numbers, x, past)[..., None].to(x.dtype)
            for numbers in (*self._sides(), self.bias)
        )
        x = (x.unflatten(-1, (self.heads, -1)) * given).flatten(2)
        if past is None:
            sums = self._sums(x)
        else:
            state = past.sums(self.place, x)
            sums = self._sums(x, state)
            count = (past.positions >= 0).sum(1)  # tokens stand in front of padding
            last = sums[torch.arange(len(x), device=x.device), count - 1]
            state.copy_(torch.where((count == 0)[:, None], state, last))
        y = (sums.to(x.dtype).unflatten(-1, (self.heads, -1)) * taken + bias).flatten(2)
        return y if residual is None else residual + y.to(residual.dtype)

    def _at(self, numbers: Tensor, x: Tensor, past: MixingCache | None) -> Tensor:
        """Numbers (heads, context) at the tokens of x, (batch or 1, tokens, heads)."""
        if past is not None:
            return numbers.T[past.positions.clamp(0, self.context - 1)]
        more = numbers[:, -1:].expand(-1, max(0, x.shape[1] - self.context))
        return torch.cat([numbers[:, : x.shape[1]], more], 1).T[None]

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
        found = []
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
            found.append(sums)
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def flops(self, tokens: int) -> int:
        """For each channel, products by d and by the scale."""
        return 2 * self.channels * 2 * tokens
