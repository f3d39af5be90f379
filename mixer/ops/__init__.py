"""Token mixing as PyTorch operators (docs/operator.md), each as kernels and in plain PyTorch."""

from mixer.ops.keyed import keyed_conv
from mixer.ops.plain import BACKENDS, turn
from mixer.ops.triangular import DTYPES, mix_row, triangular_conv

# The code of models saved by earlier versions has all operators from here, and `turn`.
__all__ = ["BACKENDS", "DTYPES", "keyed_conv", "mix_row", "triangular_conv", "turn"]
