"""Counting the floating-point operations of a model, part by part."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward pass over one sequence; an addition and a
    multiplication are one operation each.
    """

    useful: int = 0  # what the model is defined by; of a triangle of weights, the triangle alone
    executed: int = 0  # what is really computed, with the zeros that a backend multiplies
    token_mixing: int = 0  # the part of `useful` that is spent in triangular convolutions

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.useful + other.useful,
            self.executed + other.executed,
            self.token_mixing + other.token_mixing,
        )


def count_flops(module: nn.Module, tokens: int) -> Flops:
    """Flops of `module` on a sequence of `tokens` tokens.

    A module with a method `flops(tokens)` counts itself, as TriangularConv does. Any nn.Linear is
    counted here. Every other module is the sum of its children, so norms, activations and
    embeddings count as nothing, as is customary.
    """
    if hasattr(module, "flops"):
        return module.flops(tokens)
    if isinstance(module, nn.Linear):
        products = 2 * module.in_features * module.out_features * tokens
        return Flops(useful=products, executed=products)
    return sum((count_flops(child, tokens) for child in module.children()), Flops())
