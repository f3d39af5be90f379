"""The section `model` of a run's configuration. Importing it takes no time."""

import json
from dataclasses import dataclass, fields
from typing import Any

from mixer.common.options import option, option_problems
from mixer.models.masked_mixer.model_options import MixerOptions, shape_problems

# By their names in config.json. The classes are in mixer/models/architecture.py.
ARCHITECTURES = ("masked_mixer", "llama", "qwen3", "shifted_qwen3")

# Among how many texts a text's partner is looked for, where retrieval is measured.
CANDIDATES = (32, 1024, 8192)


@dataclass
class ModelConfig(MixerOptions):
    """The section `model` of a run's configuration: the options of a masked mixer, and what a
    transformer needs in addition. The vocabulary size is the tokenizer's.
    """

    architecture: str = option(
        "masked_mixer",
        "masked_mixer, or a transformer to compare with: qwen3, shifted_qwen3 (qwen3 with "
        "mixer_key_shift) or llama (no norms of queries and keys). Its intermediate_size is 8/3 x "
        "hidden_size by default: its three matrices have as many parameters as a mixer's two",
        choices=ARCHITECTURES,
    )
    num_attention_heads: int | None = option(
        None,
        "attention heads of a transformer; null: heads of 64 channels",
        at_least=1,
        at_most=2**16,
    )


# Options that all architectures have. All others of MixerOptions are of masked mixers alone.
SHARED = (
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "intermediate_size",
    "layer_norm_eps",
    "tie_word_embeddings",
)
OF_MIXERS = tuple(item.name for item in fields(MixerOptions) if item.name not in SHARED)
OF_TRANSFORMERS = ("num_attention_heads",)


def model_problems(model: ModelConfig) -> list[str]:
    """One line for each rule broken by options that are allowed alone, but not together."""
    if option_problems(model):  # the rules below need options that are allowed by themselves
        return []
    is_mixer = model.architecture == "masked_mixer"
    heads = attention_heads(model)
    problems = [
        f"{name} is {getattr(model, name)!r}, which architecture {model.architecture} does not "
        f"have; leave it out, or set model.{name}={json.dumps(getattr(ModelConfig, name))}"
        for name in (OF_TRANSFORMERS if is_mixer else OF_MIXERS)
        if getattr(model, name) != getattr(ModelConfig, name)
    ]
    if is_mixer:
        return problems + shape_problems(model)
    if model.hidden_size % (2 * heads):  # a rotary embedding turns pairs of channels
        problems.append(
            f"num_attention_heads is {heads}; allowed: 1 or more, that divide hidden_size "
            f"{model.hidden_size} into heads of an even number of channels"
        )
    return problems


def attention_heads(model: ModelConfig) -> int:
    """Of a transformer: as configured, or as many as have 64 channels each."""
    return model.num_attention_heads or max(1, model.hidden_size // 64)


def saved_options(config: dict[str, Any]) -> dict[str, Any]:
    """What `model_config` made a config.json of: the options of the section `model`, as far as they
    are there; empty for a model of another kind. The backend is the machine's, not the model's.
    """
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        return {}
    # By option, its name in config.json.
    if architecture == "masked_mixer":
        saved_names = {name: name for name in (*SHARED, *OF_MIXERS) if name != "mixing_backend"}
    else:
        saved_names = {name: name for name in (*SHARED, *OF_TRANSFORMERS)}
        saved_names["layer_norm_eps"] = "rms_norm_eps"
    options = {name: config[saved] for name, saved in saved_names.items() if saved in config}
    return {"architecture": architecture} | options
