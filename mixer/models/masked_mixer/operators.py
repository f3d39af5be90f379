"""The operations that mix tokens: with the kernels of this package where it is installed, and in
plain PyTorch elsewhere.
"""

try:
    from mixer.ops import keyed_conv, mix_row, triangular_conv
except ModuleNotFoundError as error:
    if error.name not in ("mixer", "mixer.ops"):  # the package is there, but does not work
        raise
    # Beside a saved model this is `from .plain import`: see copy_code in configuration.py.
    from mixer.ops.plain import keyed_conv, mix_row, triangular_conv

__all__ = ["keyed_conv", "mix_row", "triangular_conv"]
