"""Mixing weights by lag. A saved model has mixer/ops/lags.py itself in this place."""

from mixer.ops.lags import *  # noqa: F403
