"""Token mixing as PyTorch operators (docs/operator.md), each as kernels and in plain PyTorch."""

from mixer.ops.keyed import keyed_conv
from mixer.ops.plain import BACKENDS
from mixer.ops.plain import norm_and_rotate as turn
from mixer.ops.triangular import DTYPES, mix_row, triangular_conv

# The code of models saved by earlier versions has all of these from here, `turn` among them.
__all__ = ["BACKENDS", "DTYPES", "keyed_conv", "mix_row", "triangular_conv", "turn"]
