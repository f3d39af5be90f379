"""Orthogonalization of many matrices at once, by the Newton-Schulz iteration of Muon.

The iteration (K. Jordan et al., https://kellerjordan.github.io/posts/muon) moves the singular
values of X, which has at most as many rows as columns, towards 1 and leaves the singular vectors as
they are:

    A = X X^T;   X <- (a I + b A + c A^2) X       five times, X scaled to Frobenius norm 1 first

The singular values do not reach 1, but a place between 0.7 and 1.2: near enough for a training
step.

All factors are polynomials of the first Gram matrix X X^T, so they commute. Here most of the work
is done on the small square Gram matrices, and X is multiplied by the product of several steps: for
a matrix four times as wide as high that is two thirds of the arithmetic.
"""

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315  # as torch.optim.Muon
# Steps between two products with X. Rounding errors in a Gram matrix grow from step to step. After
# two steps the small singular values have grown by 12, and a new Gram matrix is far less sensitive.
SEGMENTS = (2, 3)
# A large matrix of norm 1 has a Gram matrix whose entries are too small for fp16.
SCALE = 32.0
SMALLEST_NORM = 1e-30


def orthogonalize(x: Tensor) -> Tensor:
    """Each matrix of x (matrices, rows, columns) orthogonalized, in the dtype of
    `normalized(x)`.
    """
    return iterate(normalized(x))


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
    if x.shape[-2] > x.shape[-1]:
        return iterate(x.mT).mT
    scale = SCALE
    for steps in SEGMENTS:
        product = _product_of_steps(torch.bmm(x, x.mT), steps, scale)
        x = torch.bmm(product / scale, x)
        scale = 1.0
    return x


def _product_of_steps(gram: Tensor, steps: int, scale: float) -> Tensor:
    """The product of so many steps' polynomials of gram / scale^2: (matrices, rows, rows)."""
    product = None
    for step in range(steps):
        polynomial = torch.baddbmm(gram, gram, gram, beta=B / scale**2, alpha=C / scale**4)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(A)
        product = polynomial if product is None else torch.bmm(polynomial, product)
        if step < steps - 1:
            gram = torch.bmm(torch.bmm(polynomial, gram), polynomial)
    return product
