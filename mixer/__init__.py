"""Masked mixers: language models that mix tokens by a learned triangular convolution (arXiv
2409.01482).

Importing this package registers its models with transformers' Auto classes.
"""

import os
import sys
from pathlib import Path

from mixer.common.errors import UserError, end_at_interrupt

# Ctrl-C is one line also while a command imports what follows, which takes seconds.
command = next(iter(getattr(sys, "argv", [])), "")  # a program that embeds Python may have none
if command == "-m" or Path(command).resolve().parent == Path(__file__).parents[1]:
    sys.excepthook = end_at_interrupt
# Idle threads sleep rather than spin on a core that another process could use: where all cores are
# busy, training is ten times as fast. PyTorch reads the variable when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mixer.models import shifted_qwen3 as shifted
from mixer.models.masked_mixer.cache import MixingCache
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM, MaskedMixerModel
from mixer.ops import triangular_conv

__version__ = "0.1.0"
__all__ = [
    "MaskedMixerConfig",
    "MaskedMixerForCausalLM",
    "MaskedMixerModel",
    "MixingCache",
    "UserError",
    "__version__",
    "triangular_conv",
]

for config, model, causal in (
    (MaskedMixerConfig, MaskedMixerModel, MaskedMixerForCausalLM),
    (shifted.ShiftedQwen3Config, shifted.ShiftedQwen3Model, shifted.ShiftedQwen3ForCausalLM),
):
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, model)
    AutoModelForCausalLM.register(config, causal)
