"""The section `model` of a run's configuration. Importing it takes no time."""

import json
from dataclasses import dataclass, fields
from typing import Any

from mixer.common.errors import UserError
from mixer.common.files import as_path, read_json
from mixer.common.options import option, option_problems
from mixer.models.masked_mixer.model_options import MixerOptions, shape_problems

# By their names in config.json. The classes are in mixer/models/architecture.py.
TRANSFORMERS = ("llama", "qwen3", "shifted_qwen3")  # built of options
ARCHITECTURES = ("masked_mixer", *TRANSFORMERS, "auto")
CONFIG_REMEDY = "give a config.json of transformers, as in configs/models"


@dataclass
class ModelConfig(MixerOptions):
    """The section `model` of a run's configuration: the options of a masked mixer, and what a
    transformer needs in addition. The vocabulary size is the tokenizer's.
    """

    architecture: str = option(
        "masked_mixer",
        "masked_mixer, or a transformer to compare with: qwen3, shifted_qwen3 (qwen3 with "
        "mixer_key_shift) or llama (no norms of queries and keys). Its intermediate_size is 8/3 x "
        "hidden_size by default: its three matrices have as many parameters as a mixer's two. "
        "auto: what model.config describes",
        choices=ARCHITECTURES,
    )
    config: str | dict | None = option(
        None,
        "of architecture auto: a JSON file as transformers' config.json, of any causal language "
        "model, or its content. Vocabulary, special tokens and context are those of the run, and "
        "there is no dropout",
    )
    num_attention_heads: int | None = option(
        None,
        "attention heads of a transformer; null: heads of 64 channels",
        at_least=1,
        at_most=2**16,
    )


# Options that mixers and transformers have.
SHARED = (
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "intermediate_size",
    "layer_norm_eps",
    "tie_word_embeddings",
)
OF_MIXERS = tuple(item.name for item in fields(MixerOptions))
OF_TRANSFORMERS = (*SHARED, "num_attention_heads")
OF_AUTO = ("max_position_embeddings", "config")
# The names of the context in the configurations of transformers (their `attribute_map`).
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "model_max_length",
    "context_length",
)
# What transformers of our options have, where a config.json says it.
ROTATION = {"rope_theta": 10000.0, "rope_type": "default"}
OF_OUR_TRANSFORMERS = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_theta": ROTATION["rope_theta"],
    "rope_parameters": ROTATION,
    "rope_scaling": None,
}


def unread_options(architecture: str) -> dict[str, Any]:
    """The options that an architecture does not have, with their defaults."""
    read = {"masked_mixer": OF_MIXERS, "auto": OF_AUTO}.get(architecture, OF_TRANSFORMERS)
    items = [item for item in fields(ModelConfig) if item.name not in ("architecture", *read)]
    return {item.name: item.default for item in items}


def model_problems(model: ModelConfig) -> list[str]:
    """One line for each rule broken by options that are allowed alone, but not together."""
    if option_problems(model):  # the rules below need options that are allowed by themselves
        return []
    problems = [
        f"{name} is {getattr(model, name)!r:.60}, which architecture {model.architecture} does not "
        f"have; leave it out, or set model.{name}={json.dumps(default)}"
        for name, default in unread_options(model.architecture).items()
        if getattr(model, name) != default
    ]
    if model.architecture == "masked_mixer":
        return problems + shape_problems(model)
    if model.architecture == "auto":
        if model.config is None:
            problems.append(f"config is null; {CONFIG_REMEDY}")
        return problems
    heads = attention_heads(model)
    if model.hidden_size % (2 * heads):  # a rotary embedding turns pairs of channels
        problems.append(
            f"num_attention_heads is {heads}; allowed: 1 or more, that divide hidden_size "
            f"{model.hidden_size} into heads of an even number of channels"
        )
    return problems


def with_content(config: str | dict | None) -> dict[str, Any] | None:
    """What model.config stands for, a file's content in place of its name. Raises UserError for a
    file that cannot be read, and for content without a model_type.
    """
    if isinstance(config, str):
        return read_json(as_path(config), CONFIG_REMEDY, required={"model_type": str})
    if config is not None and not isinstance(config.get("model_type"), str):
        raise UserError(f"it has no model_type: {CONFIG_REMEDY}")
    return config


def attention_heads(model: ModelConfig) -> int:
    """Of a transformer: as configured, or as many as have 64 channels each."""
    return model.num_attention_heads or max(1, model.hidden_size // 64)


def fits_options(config: dict[str, Any]) -> bool:
    """Whether the options of the section `model` can describe the model of a config.json. Those of
    a transformer give OF_OUR_TRANSFORMERS, and as many heads of keys as of queries, which share the
    channels.
    """
    if config.get("model_type") not in TRANSFORMERS:
        return config.get("model_type") == "masked_mixer"
    if any(config.get(name, value) != value for name, value in OF_OUR_TRANSFORMERS.items()):
        return False
    heads = config.get("num_attention_heads")
    size = config.get("head_dim")
    if config.get("num_key_value_heads") not in (None, heads):
        return False
    if not isinstance(size, int) or not isinstance(heads, int):  # then it is the class's default
        return True
    return size * heads == config.get("hidden_size")


def saved_options(config: dict[str, Any]) -> dict[str, Any]:
    """What `model_config` made a config.json of, or makes one like it of: the options of the
    section `model`, as far as they are there. The backend is the machine's, not the model's.
    """
    architecture = config.get("model_type")
    if not fits_options(config):
        saved = {"architecture": "auto", "config": config} if architecture else {}
        context = next((config[name] for name in CONTEXT_NAMES if name in config), None)
        return saved if context is None else saved | {"max_position_embeddings": context}
    # By option, its name in config.json.
    if architecture == "masked_mixer":
        saved_names = {name: name for name in OF_MIXERS if name != "mixing_backend"}
    else:
        saved_names = {name: name for name in OF_TRANSFORMERS}
        saved_names["layer_norm_eps"] = "rms_norm_eps"
    options = {name: config[saved] for name, saved in saved_names.items() if saved in config}
    return {"architecture": architecture} | options
