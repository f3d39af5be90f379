"""nn.Linear, with a faster form for the one case of a compiled decoding step."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear, or several of them with the same input as one, whose outputs stand side by side:
    Linear(in_features, out_features, ..., bias=True). `parts` has the out_features of each, as an
    optimizer of whole matrices trains each by itself.

    When one token is computed under torch.compile the same result is written differently.
    For a single token the product is a matrix times a vector, and its time is the time to read the
    weight once. Compiled, such a product can be one generated kernel together with the norm or GELU
    around it, which saves launches. Two things prevent that, so they are written another way:

    - F.linear with a bias is always left to cuBLAS. Here the bias is added in a line of its own.
    - The compiler would fuse the computation of x (a norm, a GELU) into the product and repeat it
      in each of the product's thread blocks. It never does so across `as_strided`, which works on
      memory, so x is computed once and written out first.
    """

    def __init__(self, in_features: int, *parts: int, bias: bool = True):
        super().__init__(in_features, sum(parts), bias)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and all(size == 1 for size in x.shape[:-1]):
            y = F.linear(x.as_strided(x.shape, x.stride()), self.weight)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        return super().forward(x)
