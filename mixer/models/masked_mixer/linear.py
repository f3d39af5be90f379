"""nn.Linear, with a faster form for the one case of a compiled decoding step.

This file is copied beside every saved model, so it imports nothing from the rest of the package.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear; the same result, written differently when one token is computed under
    torch.compile.

    For a single token the product is a matrix times a vector, and its time is the time to read the
    weight once. Compiled, such a product can be one generated kernel together with the norm or GELU
    around it, which saves launches. Two things prevent that, so they are written another way:

    - F.linear with a bias is always left to cuBLAS. Here the bias is added in a line of its own.
    - The compiler would fuse the computation of x (a norm, a GELU) into the product and repeat it
      in each of the product's thread blocks. It never does so across `as_strided`, which works on
      memory, so x is computed once and written out first.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and all(size == 1 for size in x.shape[:-1]):
            y = F.linear(x.as_strided(x.shape, x.stride()), self.weight)
            return y + self.bias.to(y.dtype)
        return super().forward(x)
