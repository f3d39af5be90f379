"""Orthogonalization of many matrices at once, by the Newton-Schulz iteration of Muon.

The iteration (K. Jordan et al., https://kellerjordan.github.io/posts/muon) moves the singular
values of X, which has at most as many rows as columns, towards 1 and leaves the singular vectors as
they are:

    G = X X^T;   X <- (a I + b G + c G^2) X       STEPS times, X scaled to Frobenius norm 1 first

With more rows than columns it is G = X^T X, multiplied from the other side.

The singular values do not reach 1. The larger ones end between 0.7 and 1.2, which is near enough
for a training step, and the small ones have grown 140-fold.

All factors are polynomials of the first Gram matrix X X^T, so they commute. Here all steps are done
on small square matrices, and X is multiplied twice: to get the first G, and by the product of the
polynomials. For a matrix four times as wide as high that is little more than half of the
arithmetic.
"""

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315  # as torch.optim.Muon
# a I + b G + c G^2 = c (G + SHIFT I)^2 + REST I: a product of matrices and additions to diagonals.
SHIFT, REST = B / (2 * C), A - B**2 / (4 * C)
# torch.optim.Muon does five. A fifth costs more and trains no better. It would also need a new Gram
# matrix of X, since rounding errors in G grow from step to step.
STEPS = 4
# A large matrix of norm 1 has a Gram matrix whose entries are too small for fp16.
SCALE = 32.0
SMALLEST_NORM = 1e-30


def normalized(x: Tensor) -> Tensor:
    """Scales each matrix (..., rows, columns) to Frobenius norm SCALE, in the dtype for the
    products.

    That is fp16 on a GPU: every GPU multiplies it fast, and it has three bits more than bf16.
    Gradients can be too small for it, so they are scaled first.
    """
    norm = x.square().sum((-2, -1), keepdim=True).sqrt()
    x = x * (SCALE / norm.clamp(min=SMALLEST_NORM))
    return x.to(torch.float16) if x.is_cuda else x


def iterate(x: Tensor) -> Tensor:
    """The iteration, on matrices (matrices, rows, columns) of norm SCALE as `normalized` gives
    them.
    """
    tall = x.shape[-2] > x.shape[-1]
    # (matrices, shorter side, shorter side), SCALE^2 times too large, as the next ones
    gram = _multiply(x.mT, x) if tall else _multiply(x, x.mT)
    product = None
    for step in range(STEPS):
        polynomial = _polynomial(gram)
        product = polynomial if product is None else _multiply(polynomial, product)
        if step < STEPS - 1:
            gram = _multiply(_multiply(polynomial, gram), polynomial)
    # `product` is symmetric. A transposed result would be slow to read for what comes next.
    return _multiply(x, product, 1 / SCALE) if tall else _multiply(product, x, 1 / SCALE)


def _polynomial(gram: Tensor) -> Tensor:
    """a I + b G + c G^2 for G = gram / SCALE^2. gram is changed on the way, and restored."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    kept = diagonal.clone()
    diagonal.add_(SHIFT * SCALE**2)
    result = _multiply(gram, gram, C / SCALE**4)
    diagonal.copy_(kept)
    result.diagonal(dim1=-2, dim2=-1).add_(REST)
    return result


def _multiply(left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
    """factor x left x right for batches of matrices; the factor takes no time."""
    return torch.baddbmm(left.new_zeros(()), left, right, beta=0, alpha=factor)
