"""Mixing matrices in numbers. They do not depend on the input, so what a masked mixer has learned
about tokens can be looked at directly.

A matrix W is (context, context), fp64, with a strictly upper triangle of zeros: token i receives
W[i, j] of token j, at lag i - j.
"""

import numpy as np
from torch import nn

from mixer.models.masked_mixer.convolution import TriangularConv

SHARE = 0.9  # of the last row's |W|, for the effective context
ORDER = ("first ", "second ", "third ")  # names of a block's convolutions, if it has several


def mixing_matrices(model) -> list[dict[str, np.ndarray]]:
    """The matrices of each layer by name: "W", or with the convolution, head and tap if there are
    several.
    """
    return [layer_matrices(layer.mixing) for layer in model.model.layers]


def layer_matrices(mixing: nn.Module) -> dict[str, np.ndarray]:
    found = [module for module in mixing.modules() if isinstance(module, TriangularConv)]
    prefixes = [""] if len(found) == 1 else ORDER[: len(found)]
    matrices = {}
    for prefix, conv in zip(prefixes, found, strict=True):
        # (heads, taps, context, context)
        weight = conv.mixing_weight().detach().double().cpu().tril().numpy()
        heads, taps = weight.shape[:2]
        for head, tap in np.ndindex(heads, taps):
            place = (f" head {head}" if heads > 1 else "") + (f" tap {tap}" if taps > 1 else "")
            matrices[f"{prefix}W{place}"] = weight[head, tap]
    return matrices


def by_diagonal(matrix: np.ndarray) -> np.ndarray:
    """W by lag, (context, context): row i holds W[i, i - lag] at column `lag`, and NaN at lags that
    reach back before the first token.
    """
    rows = np.arange(len(matrix))[:, None]
    read = rows - np.arange(len(matrix))  # (context, context): the token read, by row and lag
    return np.where(read >= 0, matrix[rows, np.maximum(read, 0)], np.nan)


def weight_by_lag(matrix: np.ndarray) -> np.ndarray:
    """Mean |W| of each diagonal, (context,): index 0 is the token itself."""
    return np.nanmean(np.abs(by_diagonal(matrix)), axis=0)


def effective_context(matrix: np.ndarray) -> int:
    """How many of the most recent tokens, with itself, hold 90 % of the last row's |W|.

    This says how far the weights reach. How much a far token changes the output depends on the
    activations too.
    """
    reached = np.cumsum(np.abs(matrix[-1, ::-1]))
    return 1 + int((reached < SHARE * reached[-1]).sum())


def toeplitz_distance(matrix: np.ndarray) -> float:
    """||W - T|| / ||W|| in Frobenius norm, where T is the nearest Toeplitz matrix: W with each
    diagonal replaced by its mean.

    It is 0 if every position has the same convolution, and sqrt(1 - 2 / (context + 1)) for
    independent random weights of mean zero.
    """
    diagonals = by_diagonal(matrix)
    left = diagonals - np.nanmean(diagonals, axis=0)
    square, whole = np.nansum(left**2), np.nansum(diagonals**2)
    return float(np.sqrt(square / whole)) if whole else 0.0
