"""What token mixing has to do at the least: useful operations, bytes that must move, and the time
floor of a roofline.
"""

from dataclasses import dataclass

import torch

from mixer.ops.plain import products_per_triangle

# In the order of the tables.
OPERATIONS = {
    "forward": "Forward, weight packed",
    "grad_input": "Gradient of the input",
    "grad_weight": "Gradient of the weight",
    "grad_weight_bias": "Gradients of the weight and the bias",
    "fused": "Forward with bias and residual",
    "pack": "Packing the weight: lower triangle, cast",
    "autograd": "Forward and backward through autograd, fp32 parameters",
}


@dataclass(frozen=True)
class Shape:
    """One case. `factor` names what was changed from the base case, for the tables of a sweep."""

    tokens: int
    channels: int = 1024
    batch_tokens: int = 65536
    heads: int = 1
    taps: int = 1
    dtype: str = "bfloat16"
    tf32: bool = False
    factor: str = "tokens"

    @property
    def batch(self) -> int:
        return max(1, self.batch_tokens // self.tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def activation_bytes(self) -> int:
        return self.batch * self.tokens * self.channels * self.torch_dtype.itemsize

    @property
    def arithmetic(self) -> str:
        """Key of the ceiling that holds for this case."""
        return "tf32" if self.tf32 else self.dtype


def useful_flops(shape: Shape, operation: str) -> int:
    """Two for each product on or below the diagonal."""
    one = shape.batch * shape.channels * shape.taps * shape.tokens * (shape.tokens + 1)
    return {"pack": 0, "autograd": 3}.get(operation, 1) * one


def least_bytes(shape: Shape, operation: str) -> int:
    """Every input read once and every output written once; of a weight that is read, the lower
    triangle.
    """
    squares = shape.heads * shape.taps * shape.tokens**2
    triangles = shape.heads * shape.taps * shape.tokens * (shape.tokens + 1) // 2
    size = shape.torch_dtype.itemsize
    product = 2 * shape.activation_bytes + triangles * size
    gradient = 2 * shape.activation_bytes + squares * 4
    pack = triangles * 4 + squares * size
    return {
        "forward": product,
        "grad_input": product,
        "grad_weight": gradient,
        "grad_weight_bias": gradient,
        "fused": product + shape.activation_bytes,
        "pack": pack,
        "autograd": pack + 2 * product + gradient,
    }[operation]


def floor_ms(shape: Shape, operation: str, bytes_per_ms: float, tflops: float) -> float:
    """No implementation that skips in steps of 64 rows is faster: the slower of memory and
    arithmetic, both as measured.
    """
    if operation == "autograd":
        parts = ("pack", "forward", "grad_input", "grad_weight")
        return sum(floor_ms(shape, part, bytes_per_ms, tflops) for part in parts)
    flops = (
        2 * shape.batch * shape.channels * shape.taps * products_per_triangle(shape.tokens, "cuda")
    )
    arithmetic = 0.0 if operation == "pack" else flops / (tflops * 1e9)
    return max(least_bytes(shape, operation) / bytes_per_ms, arithmetic)
