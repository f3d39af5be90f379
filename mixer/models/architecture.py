"""A run's model by its configuration: a masked mixer, or a transformers model to compare with; and
what training needs to know of any such model: its blocks, its final norm, its FLOPs.
"""

import difflib
import re
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mixer.common.errors import UserError, first_line
from mixer.common.hardware import is_out_of_memory
from mixer.models.auto import is_registered
from mixer.models.config import ModelConfig, attention_heads
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.model_options import MixerOptions
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.ops.plain import in_autocast_dtype

# For an attention of another name transformers makes no mask, and does not search for texts that
# are packed into one row, for which it would wait for the GPU in every step.
AttentionInterface.register("causal", AttentionInterface()["sdpa"])

# Of a configuration file, what describes other weights than those of a new model in fp32.
UNREAD = ("dtype", "torch_dtype", "quantization_config", "auto_map", "architectures")
UNREAD += ("transformers_version", "_name_or_path", "model_type")
# Names that configurations have for the number of experts that a token goes to.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
# How far a causal model's logits may move with later tokens, as a share of the largest: products
# may be summed in another order.
CAUSAL_TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


# ------------------------------------------------------------------------- its configuration


def model_config(model: ModelConfig, vocab_size: int, eos_token_id: int | None) -> PreTrainedConfig:
    """The transformers configuration of a run's model, for a tokenizer's vocabulary. Raises
    UserError for a model.config that describes no causal language model of transformers.
    """
    if model.architecture == "masked_mixer":
        options = {item.name: getattr(model, item.name) for item in fields(MixerOptions)}
        return MaskedMixerConfig(vocab_size=vocab_size, eos_token_id=eos_token_id, **options)
    of_run: dict[str, Any] = {
        "vocab_size": vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,  # a token of padding would get no embedding
    }
    if model.architecture == "auto":
        assert isinstance(model.config, dict)  # which the file has been replaced by
        return _config_of_file(model.config, of_run)
    default_width = max(1, round(model.hidden_size * 8 / 3 / 64)) * 64
    heads = attention_heads(model)
    of_model = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "intermediate_size": model.intermediate_size or default_width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": model.hidden_size // heads,
        "rms_norm_eps": model.layer_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    return CONFIG_MAPPING[model.architecture](**of_run | of_model)


def _config_of_file(values: dict[str, Any], of_run: dict[str, Any]) -> PreTrainedConfig:
    """The configuration that a file's values describe, with those of the run in place of its own,
    and without dropout, since steps draw no random numbers.
    """
    model_type = values["model_type"]
    _check_type(model_type, values)
    config_class = CONFIG_MAPPING[model_type]
    entries = {name: value for name, value in values.items() if name not in (*UNREAD, *of_run)}
    # A class may have a name of its own for a value, such as n_positions for the context.
    other_names = config_class.attribute_map
    entries |= {other_names.get(name, name): value for name, value in of_run.items()}
    try:
        _check_names(entries, {*config_class().to_dict(), *other_names, *of_run})
        config = config_class(**with_floats(entries))
        text_config = config.get_text_config()
    except UserError:
        raise
    except Exception as error:  # each class raises its own kinds
        raise UserError(f"model.config: {model_type} refuses it: {_reason(error)}") from None
    is_composite = text_config is not config
    if is_composite or not hasattr(config, "hidden_size"):
        allowed = "one for text alone"
        if is_composite and type(text_config) in AutoModelForCausalLM._model_mapping:
            allowed += f", such as {text_config.model_type}: give its text_config as the file"
        raise UserError(f"model.config: {model_type} is made of several models; allowed: {allowed}")
    for name, value in config.to_dict().items():
        if is_dropout(name, value):
            setattr(config, name, 0.0)
    return config


def _reason(error: Exception) -> str:
    """The first line, and what of a run may be behind it."""
    reason = first_line(error)
    if "NoneType" in reason:
        reason += "; a run has no bos_token_id and no pad_token_id, which some types must have"
    return reason


def with_floats(value: Any) -> Any:
    """A value of a config.json, where transformers writes numbers that JSON does not have as
    {"__float__": "Infinity"}.
    """
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {name: with_floats(item) for name, item in value.items()}


def is_dropout(name: str, value: Any) -> bool:
    """Whether an entry of a configuration says how much is dropped at random in training."""
    return ("drop" in name or "jitter" in name) and isinstance(value, float)


def _check_type(model_type: str, values: dict[str, Any]) -> None:
    """Raises UserError unless AutoModelForCausalLM has models of this type, which compute texts of
    any length.
    """
    problem = ""
    if not is_registered(model_type):
        problem = "is unknown to the installed transformers"
        if "auto_map" in values:
            problem += ", and code that comes with a model (auto_map) is not run"
    elif CONFIG_MAPPING[model_type] not in AutoModelForCausalLM._model_mapping:
        problem = "is no causal language model"
    elif model_type == "reformer":  # and with hashed attention it sees later tokens
        problem = "takes only texts of certain lengths"
    if problem:
        names = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name != model_type]
        near = difflib.get_close_matches(model_type, names, 3) or ["llama", "lfm2", "mamba2"]
        allowed = f"those of AutoModelForCausalLM, such as {', '.join(near)}"
        if not find_spec("fla"):
            allowed += ", and after pip install -e '.[fla]' those of flash-linear-attention"
        raise UserError(f"model.config: model_type {model_type!r} {problem}; allowed: {allowed}")


def _check_names(entries: dict[str, Any], names: set[str]) -> None:
    """Raises UserError for a name that is misspelt. Names unlike any other are let through: files
    have some that classes read without listing them, and some that nothing reads any more.
    """
    names = {name for name in names if not name.startswith("_")}
    for entry in entries.keys() - names:
        near = difflib.get_close_matches(entry, names - entries.keys(), 1, cutoff=0.9)
        if near:
            raise UserError(f"model.config: unknown key {entry}; did you mean {near[0]}?")


# ------------------------------------------------------------------------- the model


def new_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model that `model_config` describes, with initial weights."""
    return for_training(AutoModelForCausalLM.from_config(config, trust_remote_code=False))


def for_training(model: PreTrainedModel) -> PreTrainedModel:
    """The model, a transformer of which is changed to what masked mixers do: its residual stream
    has the autocast type, and it reads no attention_mask, as padding follows the text.
    """
    if isinstance(model, MaskedMixerForCausalLM):
        return model
    model.get_input_embeddings().register_forward_hook(
        lambda embedding, arguments, x: in_autocast_dtype(x)[0]
    )
    if model.config._attn_implementation == "sdpa" and not has_windows(model.config):
        model.set_attn_implementation("causal")
    return model


def has_windows(config: PreTrainedConfig) -> bool:
    """Whether some attention sees the last tokens alone, or those that an indexer chooses, for
    which it needs a mask.
    """
    endings = ("window", "window_size", "attention_chunk_size", "index_topk", "indexer_budget")
    windows = [value for name, value in vars(config).items() if name.endswith(endings)]
    layer_types = " ".join(map(str, getattr(config, "layer_types", None) or ()))
    return any(windows) or re.search("sliding|chunked|local", layer_types) is not None


def check_sizes(model: PreTrainedModel) -> None:
    """Raises UserError for a model of `architecture=auto` that has a size of 0, or no layers: it
    would train, but learn next to nothing.
    """
    model_type = model.config.model_type
    for name, weight in model.named_parameters():
        if not weight.numel():
            shape = tuple(weight.shape)
            raise UserError(
                f"model.config: this {model_type} has {name} of shape {shape}; allowed: sizes of 1 "
                "or more"
            )
    outside = {model.get_output_embeddings()}
    outside |= {module for module in model.modules() if isinstance(module, nn.Embedding)}
    inside = [module for module in model.modules() if module not in outside]
    if all(weight.ndim == 1 for module in inside for weight in module.parameters(recurse=False)):
        raise UserError(
            f"model.config: this {model_type} has no layers; allowed: 1 or more (of most models, "
            "num_hidden_layers)"
        )


def check_causal(model: PreTrainedModel) -> None:
    """Raises UserError for a model of `architecture=auto` that cannot compute a text, at least not
    in finite numbers, or whose logits depend on later tokens: it would learn to copy them; and for
    one that becomes another model by that, as BigBird does in short texts.
    """
    config = model.config
    tokens = min(8, config.max_position_embeddings)
    modules = list(model.modules())
    ids = torch.arange(tokens, device=model.device).remainder(config.vocab_size)
    was_training = model.training
    try:
        before, after = logits_before(model.eval(), ids)
    except Exception as error:  # each model raises its own kinds
        if is_out_of_memory(error):
            raise
        problem = f"cannot compute {tokens} tokens ({_reason(error)})"
        raise UserError(f"model.config: this {config.model_type} {problem}") from error
    finally:
        model.train(was_training)
    if not before.isfinite().all():
        problem = (
            f"this {config.model_type} computes numbers that are not finite, before any training"
        )
        raise UserError(f"model.config: {problem}: correct the file's numbers")
    if list(model.modules()) != modules:
        raise UserError(
            f"model.config: this {config.model_type} replaces its layers in short texts; allowed: "
            'a model that stays as it is (of big_bird, "attention_type": "original_full")'
        )
    if (before - after).abs().max() > CAUSAL_TOLERANCE["fp32"] * before.abs().max():
        raise UserError(
            f"model.config: this {config.model_type} sees later tokens, as an encoder does; "
            'allowed: a causal model (for some types with "is_decoder": true in the file)'
        )


@torch.no_grad()
def logits_before(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of a text's first half, and what they become when the other tokens are changed: in
    a causal model they stay.

    ids: (tokens,) int64. Returns (position, vocab) fp32 twice, for the position from which on
    tokens are changed: odd, to find blocks of two tokens that see each other.
    """
    position = len(ids) // 4 * 2 + 1
    changed = ids.clone()
    changed[position:] = (changed[position:] + 1) % model.config.get_text_config().vocab_size
    before, after = (
        model(text[None], use_cache=False).logits[0, :position].float() for text in (ids, changed)
    )
    return before, after


# ------------------------------------------------------------------------- its parts


def body_of(model: PreTrainedModel) -> nn.Module:
    """The model without its output layer: its `base_model`, or, where that names an attribute that
    the model does not have, as of llama4_text, the part that is a model of transformers.
    """
    if model.base_model is not model:
        return model.base_model
    models = (child for child in model.children() if isinstance(child, PreTrainedModel))
    return next(models, model)


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks, by the class that transformers has for them; in models without, the modules of
    the list that has num_hidden_layers of them.
    """
    blocks = []
    names: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in names)
        if isinstance(module, GradientCheckpointingLayer) and not is_inside:
            blocks.append(module)
            names.append(name)
    layers = getattr(model.config, "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return blocks or next((list(modules) for modules in lists if len(modules) == layers), [])


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """The last direct part of the base model that has vectors and no matrices, if there is one."""
    norm = None
    for module in body_of(model).children():
        parameters = list(module.parameters())
        if parameters and all(parameter.ndim == 1 for parameter in parameters):
            norm = module
    return norm


def flops_per_token(model: PreTrainedModel, tokens: int) -> dict[str, float] | None:
    """FLOPs of one training step per token of a text of so many tokens, with the entries of
    MaskedMixerForCausalLM.flops_per_token, whose numbers a masked mixer has. None where they are
    not known: of experts of which it is not (see share_of_experts), of attention that does not say
    so, as in transformers' oldest models, and of layers that differ in their heads.

    A transformer's are those of its matrices and convolutions, of experts as many as a token goes
    to; and `token_mixing`, its attention without projections. The states of recurrences, such as
    Mamba's, are left out: they depend on how they are computed, and are small beside the matrices.
    """
    if isinstance(model, MaskedMixerForCausalLM):
        return model.flops_per_token()
    products = 0.0
    mixing = 0.0
    for path, module in model.named_modules():
        matrices = [
            parameter
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim > 1 and "bias" not in name
        ]
        share = 1.0
        if matrices and are_experts(path, module):
            share = share_of_experts(matrices, model.config)
        if share is None:
            return None
        if not isinstance(module, nn.Embedding):
            products += 2 * share * sum(matrix.numel() for matrix in matrices)
        if getattr(module, "is_causal", False) and "Linear" not in type(module).__name__:
            attention = attention_flops(module, model.config, tokens)
            if attention is None:
                return None
            mixing += attention
    if not mixing and any("Attention" in type(module).__name__ for module in model.modules()):
        return None
    return {"useful": 3.0 * (products + mixing), "token_mixing": 3.0 * mixing}


def are_experts(path: str, module: nn.Module) -> bool:
    """Whether a module has the weights of experts, to some of which each token goes: all of them,
    or one in a list of modules.
    """
    is_one = re.search(r"\bexperts\.\d+\b", path) is not None
    return (is_one or "Expert" in type(module).__name__) and "shared" not in path


def share_of_experts(matrices: list[nn.Parameter], config: PreTrainedConfig) -> float | None:
    """How much of the weights of experts, each (experts, rows, columns), a token is multiplied
    with. None if that is not known: configurations may not say to how many a token goes, or another
    number for each layer, and some experts may have no weights, so that parameters differ in how
    many they are of.
    """
    values = [of_all_layers(config, name) for name in EXPERTS_PER_TOKEN]
    chosen = [value for value in values if isinstance(value, int)]
    experts = {len(matrix) for matrix in matrices if matrix.ndim == 3}
    if not chosen or len(experts) != 1 or any(matrix.ndim != 3 for matrix in matrices):
        return None
    return min(chosen[0] / experts.pop(), 1.0)


def of_all_layers(config: PreTrainedConfig, name: str) -> Any:
    """An entry of a configuration. None if it has none, or others for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # so transformers answers where layers differ
        return None


def attention_flops(attention: nn.Module, config: PreTrainedConfig, tokens: int) -> float | None:
    """Of the scores, and of the sum of the values, for a token that sees itself and all earlier
    ones, or those in a window. None if layers differ in their heads.
    """
    heads = of_all_layers(config, "num_attention_heads")
    if heads is None:
        return None
    head_dim = getattr(attention, "head_dim", config.hidden_size // heads)
    # Of keys and of values: latent attention (MLA) has two widths.
    widths = getattr(attention, "qk_head_dim", head_dim) + getattr(
        attention, "v_head_dim", head_dim
    )
    window = min(getattr(attention, "sliding_window", None) or tokens, tokens)
    seen = window - window * (window - 1) / (2 * tokens)  # on average
    return 2 * heads * widths * seen
