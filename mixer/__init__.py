"""Masked mixers: language models whose token mixing is a learned triangular convolution (arXiv
2409.01482).

Importing this package registers the model with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM, MaskedMixerModel
from mixer.ops import triangular_conv
from mixer.version import __version__

__all__ = [
    "MaskedMixerConfig",
    "MaskedMixerForCausalLM",
    "MaskedMixerModel",
    "__version__",
    "triangular_conv",
]

AutoConfig.register(MaskedMixerConfig.model_type, MaskedMixerConfig)
AutoModel.register(MaskedMixerConfig, MaskedMixerModel)
AutoModelForCausalLM.register(MaskedMixerConfig, MaskedMixerForCausalLM)

# What save_pretrained writes carries its code, for trust_remote_code where this package is not
# imported.
MaskedMixerConfig.register_for_auto_class()
MaskedMixerModel.register_for_auto_class("AutoModel")
MaskedMixerForCausalLM.register_for_auto_class("AutoModelForCausalLM")
