"""A run's model by its configuration: a masked mixer, or a transformer to compare with."""

from dataclasses import fields

from torch import nn
from transformers import (
    AttentionInterface,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

from mixer.models.config import ModelConfig, attention_heads
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.model_options import MixerOptions
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.models.shifted_qwen3 import ShiftedQwen3ForCausalLM
from mixer.ops.plain import in_autocast_dtype

# For an attention of another name transformers makes no mask, and does not search for texts that
# are packed into one row, for which it would wait for the GPU in every step.
AttentionInterface.register("causal", AttentionInterface()["sdpa"])


class Transformer:
    """A transformers model with what masked mixers have: `flops_per_token`, and under autocast a
    residual stream in the autocast type. It reads no attention_mask: padding follows the text.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.set_attn_implementation("causal")
        self.model.embed_tokens.register_forward_hook(
            lambda embedding, arguments, x: in_autocast_dtype(x)[0]
        )

    def flops_per_token(self) -> dict[str, float]:
        """As MaskedMixerForCausalLM.flops_per_token; `token_mixing` is attention without its
        projections. A token attends to (tokens + 1) / 2 tokens on average.
        """
        config = self.config
        tokens = config.max_position_embeddings
        layers = [module for module in self.modules() if isinstance(module, nn.Linear)]
        linear = sum(2 * layer.weight.numel() for layer in layers)
        # the scores, and the sum of the values
        mixing = config.num_hidden_layers * 2 * 2 * config.hidden_size * (tokens + 1) / 2
        return {"useful": 3.0 * (linear + mixing), "token_mixing": 3.0 * mixing}


class Llama(Transformer, LlamaForCausalLM):
    """Queries and keys without norms (arXiv 2302.13971)."""


class Qwen3(Transformer, Qwen3ForCausalLM):
    """RMS-normed queries and keys (arXiv 2505.09388): the transformer of today."""


class ShiftedQwen3(Transformer, ShiftedQwen3ForCausalLM):
    """Qwen3 with the shifted keys that mixers may have."""


TRANSFORMERS = {"llama": Llama, "qwen3": Qwen3, "shifted_qwen3": ShiftedQwen3}  # by architecture
MODELS = {"masked_mixer": MaskedMixerForCausalLM, **TRANSFORMERS}


def model_config(model: ModelConfig, vocab_size: int, eos_token_id: int | None) -> PreTrainedConfig:
    """The transformers configuration of a run's model, for a tokenizer's vocabulary."""
    if model.architecture == "masked_mixer":
        options = {item.name: getattr(model, item.name) for item in fields(MixerOptions)}
        return MaskedMixerConfig(vocab_size=vocab_size, eos_token_id=eos_token_id, **options)
    default_width = max(1, round(model.hidden_size * 8 / 3 / 64)) * 64
    heads = attention_heads(model)
    return TRANSFORMERS[model.architecture].config_class(
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_hidden_layers,
        max_position_embeddings=model.max_position_embeddings,
        intermediate_size=model.intermediate_size or default_width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=model.hidden_size // heads,
        rms_norm_eps=model.layer_norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
        bos_token_id=None,
    )


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of the model that `model_config` describes."""
    return next(model for model in MODELS.values() if model.config_class is type(config))
