"""Registers the models with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

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


def causal_class(config: PreTrainedConfig) -> type:
    """The class that AutoModelForCausalLM loads for a configuration."""
    return AutoModelForCausalLM._model_mapping[type(config)]
