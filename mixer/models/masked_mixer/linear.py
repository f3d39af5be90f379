"""Linear layers that share their input, in one matrix."""

from torch import nn


class Linear(nn.Linear):
    """nn.Linear, or several of them with the same input as one, whose outputs stand side by side:
    Linear(in_features, out_features, ..., bias=True). `parts` has the out_features of each, for an
    optimizer of whole matrices.
    """

    def __init__(self, in_features: int, *parts: int, bias: bool = True):
        super().__init__(in_features, sum(parts), bias)
        self.parts = parts
