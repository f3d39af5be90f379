"""Options of a configuration. A saved model has mixer/common/options.py itself in this place."""

from mixer.common.options import *  # noqa: F403
