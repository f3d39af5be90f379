"""Masked mixers: language models that mix tokens by a learned triangular convolution (arXiv
2409.01482).

Importing this package registers its models with transformers' Auto classes.
"""

import os
import sys
from pathlib import Path

from mixer.common.errors import UserError, end_at_interrupt

__version__ = "0.2.0"
__all__ = [
    "MaskedMixerConfig",
    "MaskedMixerForCausalLM",
    "MaskedMixerModel",
    "MixingCache",
    "UserError",
    "__version__",
    "triangular_conv",
]
# Idle threads sleep rather than spin on a core that another process could use: where all cores are
# busy, training is ten times as fast. PyTorch reads the variable when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _is_command() -> bool:
    """Whether this process is a command of the package: by `python -m mixer` or `python -m
    mixer.NAME`, by the script `mixer` that pip installs, or by a script beside the package.
    """
    program, *arguments = getattr(sys, "argv", None) or [""]  # some programs embed Python
    if program == "-m":  # while Python looks for a module, whose name is before the arguments
        module = sys.orig_argv[-len(arguments) - 1].removeprefix("-m")
        return module == "mixer" or module.startswith("mixer.")
    if Path(program).name == "mixer":
        return True
    scripts = Path(__file__).parents[1]
    return Path(program).resolve() in (scripts / "train.py", scripts / "eval.py")


if _is_command():
    # Ctrl-C is one line also while a command imports what it needs, which takes seconds. It does so
    # after a look at its options.
    sys.excepthook = end_at_interrupt
else:
    from mixer.models.auto import MaskedMixerConfig, MaskedMixerForCausalLM, MaskedMixerModel
    from mixer.models.masked_mixer.cache import MixingCache
    from mixer.ops import triangular_conv
