"""The operations in plain PyTorch. A saved model has mixer/ops/plain.py itself in this place."""

from mixer.ops.plain import *  # noqa: F403
