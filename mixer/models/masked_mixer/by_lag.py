"""Convolutions with a weight by lag: one number for each distance of two tokens, so that nothing
grows with the square of the context.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import SHIFT_NOISE, KeyedConv, TriangularConv
from .lags import diagonal_sums, weight_by_lag


class LagConv(TriangularConv):
    """A TriangularConv whose parameters are `lags` (heads, taps, context) and `bias`."""

    def make_weight(self) -> None:
        self.lags = nn.Parameter(torch.empty(self.heads, self.taps, self.context))
        self.register_buffer("decay", None)

    def mixing_weight(self) -> Tensor:
        return weight_by_lag(self.lags, self.decay, self.context)

    @torch.no_grad()
    def set_mixing_weight(self, weight: Tensor) -> None:
        self.lags.zero_()
        numbers = torch.arange(self.context, 0, -1, device=weight.device)  # on each diagonal
        self.lags.copy_(diagonal_sums(weight - self.mixing_weight()) / numbers)

    def operands(self) -> dict[str, Tensor]:
        return {"lags": self.lags}

    def _start(self) -> None:
        if self.initial == "zero":
            self.lags.zero_()
        if self.initial == "shift":
            self.lags.mul_(SHIFT_NOISE).add_(self._shifts())

    @torch.no_grad()
    def extend(self, context: int) -> None:
        """Has room for more tokens: further lags are zero, further biases the last one."""
        more = context - self.context
        self.lags = nn.Parameter(F.pad(self.lags, (0, more)))
        last = self.bias[:, -1:].expand(-1, more)
        self.bias = nn.Parameter(torch.cat([self.bias, last], -1))
        self.context = context


class KeyedLagConv(LagConv, KeyedConv):
    """A KeyedConv with `lags` (heads, 1, context), which are added to what a head starts from: a
    mean of earlier tokens by `decay` (heads,), which is not trained.
    """

    def make_weight(self) -> None:
        super().make_weight()
        self.decay = torch.zeros(self.heads)

    def operands(self) -> dict[str, Tensor]:
        return {"lags": self.lags, "decay": self.decay}

    def _start(self) -> None:
        self.lags.zero_()
        self.decay.copy_(self._decays())
