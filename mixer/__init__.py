"""Masked mixers: language models that mix tokens by a learned triangular convolution (arXiv
2409.01482).

Importing this package takes no time and registers its models with transformers' Auto classes. What
it exports is imported when it is asked for.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixer.common.errors import UserError
from mixer.models import auto

if TYPE_CHECKING:
    from mixer.models.masked_mixer.cache import MixingCache
    from mixer.models.masked_mixer.configuration import MaskedMixerConfig
    from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM, MaskedMixerModel
    from mixer.ops import triangular_conv

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
# Where each is, of the exports that take time to import.
_MODULES = {
    "MaskedMixerConfig": "mixer.models.masked_mixer.configuration",
    "MaskedMixerForCausalLM": "mixer.models.masked_mixer.modeling",
    "MaskedMixerModel": "mixer.models.masked_mixer.modeling",
    "MixingCache": "mixer.models.masked_mixer.cache",
    "triangular_conv": "mixer.ops",
}
# Idle threads sleep rather than spin on a core that another process could use: where all cores are
# busy, training is ten times as fast. PyTorch reads the variable when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# `python -m mixer.train`, as earlier versions called it, finds mixer/commands/train.py.
__path__.append(str(Path(__file__).with_name("commands")))
auto.register()


def __getattr__(name: str) -> Any:
    if name == "ops":  # mixer.ops.keyed_conv and the like, after `import mixer` alone
        return import_module("mixer.ops")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
