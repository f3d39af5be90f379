"""Loading a checkpoint directory, of a masked mixer or any other causal language model that
transformers knows. Every fault of the directory is named.
"""

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from mixer.checkpoints.format import REMEDY, STATE, damage
from mixer.common.errors import UserError, first_line
from mixer.common.hardware import is_out_of_memory
from mixer.common.parsing import read_json
from mixer.data.tokenizer import read_tokenizer, vocabulary_size
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM

ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"
# Embeddings are padded up to a multiple of a round number; no model is known to pad by more.
LARGEST_PADDING = 1024
# The names that configurations of transformers have for the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def settled(checkpoint: str | Path) -> Path:
    """The checkpoint that a link such as runs/demo/best points to now. Training may move the link,
    so whoever reads several files asks once.
    """
    return Path(os.path.realpath(checkpoint) if os.path.islink(checkpoint) else checkpoint)


def check_checkpoint(directory: Path) -> None:
    """Raises UserError naming what a checkpoint directory lacks, which of its weight files is cut
    short, or which of its files is not what training wrote. Loads nothing.
    """
    if problem := _problem(directory):
        raise UserError(f"checkpoint {directory} {problem}")


def _problem(directory: Path) -> str:
    if not directory.is_dir():
        return "is not a directory: give one such as runs/demo/step-600"
    needed = [directory / "config.json", *weight_files(directory)]
    if missing := [file.name for file in needed if not file.is_file()]:
        if steps := sorted(directory.glob("step-*"), key=os.path.getmtime):
            return f"is a run, not a checkpoint: give one of its steps, e.g. {steps[-1]}"
        return (
            f"is incomplete, it lacks {', '.join(missing)}: give a complete one that "
            "save_pretrained wrote (weights as safetensors, pickled ones are not read)"
        )
    problem = None
    if re.fullmatch(r"step-\d+(\.old)?\.partial", directory.name):
        problem = "it was being written or deleted"
    elif (directory / STATE).is_dir():  # a model from elsewhere has none
        problem = damage(directory, whole=False)
    if problem:
        return (
            f"is damaged: {problem}: copy it again, or give another checkpoint; if you changed "
            f"that file on purpose, delete {STATE}/ from a copy of it"
        )
    if (directory / ADAPTER).is_file():
        return (
            f"has an adapter, {ADAPTER}, which would change its weights: move it to a folder of "
            "its own, or merge it and save the merged model"
        )
    # Before anything has as many layers as config.json says.
    written, tensors = read_json(directory / "config.json", REMEDY), len(weight_types(directory))
    text = written.get("text_config")
    for values in (written, text if isinstance(text, dict) else {}):
        for name in LAYERS:
            if isinstance(values.get(name), int) and not 1 <= values[name] <= tensors:
                return (
                    f"has {name} {values[name]} in its config.json, but its weights are {tensors} "
                    "tensors: give the config.json that was saved with them"
                )
    return ""


def weight_files(directory: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names where there is none: what transformers
    reads.
    """
    index, whole = directory / INDEX, directory / "model.safetensors"
    if whole.is_file() or not index.is_file():
        return [whole]
    shards = read_json(index, REMEDY, required={"weight_map": dict})["weight_map"].values()
    return [directory / name for name in sorted(set(map(str, shards)))]


def weight_types(directory: Path) -> dict[str, str]:
    """The type of each tensor, by name, from the weight files' headers. safetensors compares a
    file's length with its header's, so this finds one that is cut short without reading it.
    """
    types = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, "pt") as opened:
                types |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"checkpoint {directory} cannot be read: {file.name} is damaged or cut short "
                f"({error}): {REMEDY}"
            ) from None
    return types


def load_checkpoint(
    directory: Path, device: torch.device, backend: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """(model in fp32 on the device and in eval mode, tokenizer) of any causal language model.

    backend: the mixing backend of a masked mixer, other models have none; empty: what the
    checkpoint says. Raises UserError where the directory is incomplete or damaged, where the model
    is no causal language model that transformers knows, and where the tokenizer is another model's.
    """
    check_checkpoint(directory)
    config = load_model_config(directory)
    if backend and isinstance(config, MaskedMixerConfig):
        config.mixing_backend = backend
    tokenizer = read_tokenizer(str(directory))
    vocab_size = config.get_text_config().vocab_size
    if vocab_size > vocabulary_size(tokenizer):  # ids beyond the model's are refused in texts
        check_vocabulary(tokenizer, vocab_size, f"the tokenizer in {directory}")
    return load_model(directory, config).to(device).eval(), tokenizer


def load_masked_mixer(directory: Path) -> MaskedMixerForCausalLM:
    """`load_checkpoint`, of a masked mixer alone, on the CPU; a tokenizer may be missing."""
    check_checkpoint(directory)
    return require_masked_mixer(directory, load_model(directory, load_model_config(directory)))


def require_masked_mixer(directory: Path, model: PreTrainedModel) -> MaskedMixerForCausalLM:
    """The model. Raises UserError for another architecture."""
    if not isinstance(model, MaskedMixerForCausalLM):
        raise UserError(
            f"checkpoint {directory} is a {model.config.model_type}: give one of a masked mixer"
        )
    return model


def load_model_config(directory: Path) -> PreTrainedConfig:
    """Raises UserError for a config.json that the installed transformers cannot use."""
    try:
        config = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers and the hub client each raise their own kinds
        raise UserError(
            f"checkpoint {directory} has a config.json that cannot be used ({first_line(error)}); "
            "allowed: of a masked_mixer, or of any causal language model that the installed "
            "transformers has: correct it, or copy the one that was saved with the model"
        ) from None
    config.return_dict = True  # whatever the file says: callers read outputs by their names
    for name in ("auto_map", "transformers_weights"):  # other code, and other files of weights
        vars(config).pop(name, None)
    return config


def load_model(
    directory: Path,
    config: PreTrainedConfig,
    kind: type = AutoModelForCausalLM,
) -> PreTrainedModel:
    """The directory's model in fp32, on the CPU; raises UserError where its weights cannot be read,
    are not all there or are no finite floating-point numbers.
    """
    disable_progress_bar()
    try:
        model, loading = kind.from_pretrained(
            str(directory),
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
        )
    except Exception as error:  # transformers and a model's own code each raise their own kinds
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"checkpoint {directory} cannot be read ({first_line(error)}): give another checkpoint"
        ) from error
    check_weights(directory, model, loading)
    check_finite(directory, model)
    return model


def check_weights(directory: Path, model: PreTrainedModel, loading: dict) -> None:
    """Raises UserError for parameters that the checkpoint lacks, which transformers would go on
    with as random numbers, for weights that the model has no place for, which it would leave out,
    and for parameters that are saved as integers, bool or complex numbers.
    """
    unknown = sorted(loading["unexpected_keys"])
    if not isinstance(model, MaskedMixerForCausalLM):
        # Old versions may have saved what is not needed. Weights that differ from the model's in
        # the number of their layer alone are layers that config.json leaves out.
        known = {without_numbers(name) for name in model.state_dict()}
        unknown = [name for name in unknown if without_numbers(name) in known]
    names = [f".{name}" for name, _ in model.named_parameters(remove_duplicate=False)]
    wrong = [
        f"{saved} of type {kind}"
        for saved, kind in weight_types(directory).items()
        if not kind.startswith(("F", "BF"))  # buffers, such as masks, may be of others
        and any(name.endswith(f".{saved}") for name in names)
    ]
    for found, problem in (
        (sorted(loading["missing_keys"]), "lacks the weights"),
        (unknown, "has weights that its config.json has no place for,"),
        (wrong, "has weights that are no floating-point numbers,"),
    ):
        if found:
            raise UserError(
                f"checkpoint {directory} {problem} {', '.join(found[:3])}...: give a complete "
                "checkpoint, as training or save_pretrained wrote it"
            )


def without_numbers(name: str) -> str:
    """model.layers.3.mlp.weight -> model.layers.N.mlp.weight"""
    return re.sub(r"\.\d+(?=\.)", ".N", name)


def check_finite(source: Path, model: PreTrainedModel, remedy: str = "") -> None:
    """Raises UserError naming the weights that hold a NaN or an infinity."""
    bad = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if bad:
        remedy = remedy or "its training diverged, or the file is damaged: give another checkpoint"
        raise UserError(
            f"checkpoint {source} has weights that are not finite (NaN or infinite) in "
            f"{', '.join(bad[:3])}{', ...' if bad[3:] else ''}: {remedy}"
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int, what: str) -> None:
    """Raises UserError for a tokenizer that cannot be the model's, which may have more ids
    (padding), never less, nor so many more that it is another model's. what: names the tokenizer.
    """
    ids = vocabulary_size(tokenizer)
    if not ids <= vocab_size <= ids + LARGEST_PADDING:
        raise UserError(
            f"{what} has {ids} ids, the model {vocab_size}; allowed: as many, or up to "
            f"{LARGEST_PADDING} more in the model: give the tokenizer that it was trained with (of "
            "a run: the tokenizer/ folder of its data)"
        )


def check_token(largest: int, model: PreTrainedModel, what: str) -> None:
    """Raises UserError for a token that the model does not have. what: names its text."""
    ids = model.config.get_text_config().vocab_size
    if largest >= ids:
        raise UserError(
            f"{what} has token {largest}, the model's vocabulary ends at {ids - 1}: give another "
            "text, or the tokenizer that the model was trained with"
        )
