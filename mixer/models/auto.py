"""The models under transformers' Auto classes: ours, and those of flash-linear-attention where it
is installed.
"""

import importlib.util

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mixer.models import shifted_qwen3 as shifted
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM, MaskedMixerModel

for config, model, causal in (
    (MaskedMixerConfig, MaskedMixerModel, MaskedMixerForCausalLM),
    (shifted.ShiftedQwen3Config, shifted.ShiftedQwen3Model, shifted.ShiftedQwen3ForCausalLM),
):
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, model)
    AutoModelForCausalLM.register(config, causal)


def is_registered(model_type: str) -> bool:
    """Whether transformers has a configuration of this type. Types that flash-linear-attention
    alone has, such as gated_deltanet, are registered when it is imported: not before, because it
    needs Triton, and replaces transformers' own mamba2, which runs without.
    """
    if model_type not in CONFIG_MAPPING and importlib.util.find_spec("fla"):
        import fla  # noqa: F401
    return model_type in CONFIG_MAPPING


def causal_class(config: PreTrainedConfig) -> type:
    """The class that AutoModelForCausalLM loads for a configuration."""
    return AutoModelForCausalLM._model_mapping[type(config)]
