"""The model of a run, from its configuration: a masked mixer, or the Llama that it is compared
with.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from mixer.models.llama import Llama
from mixer.models.masked_mixer.configuration import MaskedMixerConfig, shape_problems
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM

ARCHITECTURES = ("masked_mixer", "llama")
MODELS = {MaskedMixerConfig: MaskedMixerForCausalLM, LlamaConfig: Llama}


def _size(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class ModelConfig:
    """Fields of MaskedMixerConfig or LlamaConfig; the vocabulary's size comes from the
    tokenizer.
    """

    architecture: str = _size(
        "masked_mixer",
        "masked_mixer, or llama: a transformer to compare with, trained by the same loop",
    )
    hidden_size: int = _size(1024, "channels of the residual stream")
    num_hidden_layers: int = _size(16, "number of blocks")
    max_position_embeddings: int = _size(512, "the context, in tokens")
    intermediate_size: int | None = _size(
        None,
        "width of the MLP; null for 4 x hidden_size (llama, which has three matrices there: 8/3, for as many parameters)",
    )
    num_mixer_heads: int = _size(1, "groups of channels with a mixing weight each")
    mixer_kernel_size: int = _size(1, "taps over the channels per pair of tokens")
    mixer_expansion: bool = _size(False, "two triangular convolutions with a GELU between")
    num_attention_heads: int | None = _size(None, "llama's heads; null for heads of 64 channels")
    layer_norm_eps: float = _size(1e-5, "epsilon of every LayerNorm")
    tie_word_embeddings: bool = _size(False, "use the embedding's weight in lm_head")
    final_norm: bool = _size(False, "a LayerNorm before lm_head")
    mixing_backend: str = _size(
        "auto", "the switch: auto, cuda (our kernels), panels or dense (masked-weight matmul)"
    )


OF_MIXERS = (
    "num_mixer_heads",
    "mixer_kernel_size",
    "mixer_expansion",
    "final_norm",
    "mixing_backend",
)
OF_LLAMA = ("num_attention_heads",)


def model_problems(model: ModelConfig) -> list[str]:
    """Everything wrong with a model's configuration, a line each: KEY is VALUE, and what is
    allowed.
    """
    if model.architecture not in ARCHITECTURES:
        return [f"architecture is {model.architecture!r}; allowed: {', '.join(ARCHITECTURES)}"]
    unused, defaults = (
        OF_LLAMA if model.architecture == "masked_mixer" else OF_MIXERS,
        ModelConfig(),
    )
    problems = [
        f"{name} is {getattr(model, name)!r}, which architecture {model.architecture} does not have; leave it out"
        for name in unused
        if getattr(model, name) != getattr(defaults, name)
    ]
    problems += shape_problems(model)
    if model.architecture == "llama" and not problems:
        heads = attention_heads(model)
        if heads < 1 or model.hidden_size % (
            2 * heads
        ):  # a rotary embedding turns pairs of channels
            problems.append(
                f"num_attention_heads is {heads}; allowed: 1 or more, that divide hidden_size {model.hidden_size} into heads of "
                "an even number of channels"
            )
    return problems


def attention_heads(model: ModelConfig) -> int:
    return (
        max(1, model.hidden_size // 64)
        if model.num_attention_heads is None
        else model.num_attention_heads
    )


def model_config(model: ModelConfig, vocab_size: int, eos_token_id: int | None) -> PreTrainedConfig:
    """The configuration of the model as transformers has it, for a tokenizer's vocabulary."""
    common = {"vocab_size": vocab_size, "eos_token_id": eos_token_id}
    if model.architecture == "masked_mixer":
        left_out = ("architecture", *OF_LLAMA)
        return MaskedMixerConfig(
            **common, **{key: value for key, value in asdict(model).items() if key not in left_out}
        )
    return LlamaConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_hidden_layers,
        max_position_embeddings=model.max_position_embeddings,
        intermediate_size=model.intermediate_size
        or max(1, round(model.hidden_size * 8 / 3 / 64)) * 64,
        num_attention_heads=attention_heads(model),
        rms_norm_eps=model.layer_norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
        bos_token_id=None,
        **common,
    )


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that trains a `model_config`."""
    return MODELS[type(config)]
