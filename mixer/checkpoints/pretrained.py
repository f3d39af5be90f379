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

from mixer.checkpoints.format import STATE, changed
from mixer.common.checksums import sha256
from mixer.common.errors import UserError, first_line
from mixer.common.json_file import NONE, read_json
from mixer.common.memory import is_out_of_memory
from mixer.data.tokenizer import read_tokenizer, vocabulary_size
from mixer.models.masked_mixer.configuration import MaskedMixerConfig

ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# Embeddings are padded up to a multiple of a round number; no model is known to pad by more.
LARGEST_PADDING = 1024
# The names that most configurations of transformers have for a model's sizes.
SIZES = ("num_hidden_layers", "hidden_size", "max_position_embeddings")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Of the JSON files that transformers reads, the keys whose values it uses without looking at their
# type. All are optional.
JSON_FILES = {
    "config.json": {
        "model_type": str,
        "auto_map": (dict, NONE),
        "dtype": (str, NONE),
        "torch_dtype": (str, NONE),
        "_attn_implementation": (str, dict, NONE),
        "attn_implementation": (str, dict, NONE),
    },
    "generation_config.json": {},
    "tokenizer_config.json": {"model_max_length": (int, float, NONE)},
}

# What to do about each missing part.
REMEDIES = {
    "config.json": "give a directory that save_pretrained wrote",
    "model.safetensors": "give a complete checkpoint, with its weights as safetensors (pickled "
    "ones are not read)",
    "tokenizer.json": "copy the tokenizer that it was trained with into it (of a run: the "
    "tokenizer/ folder of its data)",
}


def settled(checkpoint: str | Path) -> Path:
    """The checkpoint that a link such as runs/demo/best points to now. Training may move the link,
    so whoever reads several files asks once.
    """
    return Path(os.path.realpath(checkpoint) if os.path.islink(checkpoint) else checkpoint)


def check_checkpoint(directory: Path, tokenizer: bool = True) -> None:
    """Raises UserError naming what a checkpoint directory lacks, which of its weight files is cut
    short, or which of its files is not what training wrote.

    tokenizer: whether one is needed.
    """
    if not directory.is_dir():
        raise UserError(
            f"checkpoint {directory} is not a directory: give one such as runs/demo/step-600"
        )
    missing = missing_files(directory, tokenizer)
    steps = sorted(
        (path for path in directory.glob("step-*") if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
    )
    if missing and steps:
        raise UserError(
            f"{directory} is a run, not a checkpoint: give one of its steps, e.g. {steps[-1]}"
        )
    if missing:
        remedy = REMEDIES.get(
            missing[0], "copy the missing files into it, or give a complete checkpoint"
        )
        raise UserError(
            f"checkpoint {directory} is incomplete, it lacks {', '.join(missing)}: {remedy}"
        )
    for name, keys in JSON_FILES.items():
        if (directory / name).is_file():
            remedy = "copy the file that was saved with the model"
            read_json(directory / name, remedy, optional=keys)
    check_layers(directory, len(weight_types(directory)))
    problem = changed(directory)
    if problem:
        raise UserError(
            f"checkpoint {directory} is damaged: {problem}: copy it again, or give another "
            f"checkpoint; if you changed that file on purpose, delete {STATE}/ from a copy of it"
        )
    if (directory / ADAPTER).is_file():
        raise UserError(
            f"checkpoint {directory} has an adapter, {ADAPTER}, which would change its weights: "
            "move it to a folder of its own, or merge it and save the merged model"
        )


def missing_files(directory: Path, tokenizer: bool) -> list[str]:
    missing = [name for name in ("config.json",) if not (directory / name).is_file()]
    missing += [file.name for file in weight_files(directory) if not file.is_file()]
    if tokenizer and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        missing.append("tokenizer.json")
    return missing


def weight_files(directory: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names where there is none: what transformers
    reads.
    """
    index, whole = directory / INDEX, directory / "model.safetensors"
    if whole.is_file() or not index.is_file():
        return [whole]
    remedy = "copy it again, or give another checkpoint"
    shards = read_json(index, remedy, required={"weight_map": dict})["weight_map"].values()
    if not all(isinstance(name, str) for name in shards):
        raise UserError(f"{index} is damaged (weight_map must hold names of files): {remedy}")
    return [directory / name for name in sorted(set(shards))]


def weights_sha256(directory: Path) -> list[str]:
    """Of each weight file: what tells these weights from those that stood in the same place
    before.
    """
    return [sha256(file) for file in weight_files(directory)]


def weight_types(directory: Path) -> dict[str, str]:
    """The type of each tensor, by name, from the weight files' headers."""
    return {name: kind for file in weight_files(directory) for name, kind in _header(file)}


def _header(file: Path) -> list[tuple[str, str]]:
    """safetensors compares the file's length with its header's, so this finds a shard cut short
    without reading it.
    """
    try:
        with safe_open(file, "pt") as opened:
            return [(name, opened.get_slice(name).get_dtype()) for name in opened.keys()]
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"checkpoint {file.parent} cannot be read: {file.name} ({file.stat().st_size:,} bytes) "
            f"is damaged or cut short ({error}): copy it again, or give another checkpoint"
        ) from None


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
    vocab_size, what = config.get_text_config().vocab_size, f"the tokenizer in {directory}"
    if vocab_size > vocabulary_size(tokenizer):  # ids beyond the model's are refused in texts
        check_vocabulary(tokenizer, vocab_size, what, REMEDIES["tokenizer.json"])
    return load_model(directory, config).to(device).eval(), tokenizer


def check_layers(directory: Path, tensors: int) -> None:
    """Raises UserError for more layers than tensors, before anything has as many of them."""
    written = read_json(directory / "config.json", REMEDIES["config.json"])
    text = written.get("text_config")
    for values in (written, text if isinstance(text, dict) else {}):
        for name in LAYERS:
            if type(values.get(name)) is int and values[name] > tensors:
                raise UserError(
                    f"the config.json of checkpoint {directory} has {name} {values[name]}, but its "
                    f"weights are {tensors} tensors: give the config.json that was saved with them"
                )


def load_model(
    directory: Path,
    config: PreTrainedConfig,
    kind: type[PreTrainedModel] | type[AutoModelForCausalLM] = AutoModelForCausalLM,
) -> PreTrainedModel:
    """The directory's model in fp32, on the CPU; raises UserError where its weights cannot be read,
    are not all there or are no floating-point numbers.
    """
    disable_progress_bar()
    vars(config).pop("transformers_weights", None)  # which names another file than weight_files
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
            f"checkpoint {directory} cannot be read ({error}): give another checkpoint"
        ) from error
    absent = sorted(loading["missing_keys"])
    if absent:  # transformers would go on with random numbers in their place
        raise UserError(
            f"checkpoint {directory} lacks the weights {', '.join(absent[:3])}...: give a "
            "complete checkpoint"
        )
    check_unknown_weights(directory, model, sorted(loading["unexpected_keys"]))
    check_types(directory, model)
    check_finite(directory, model)
    return model


def check_unknown_weights(directory: Path, model: PreTrainedModel, unknown: list[str]) -> None:
    """Raises UserError for weights of the checkpoint that the model has no place for.

    A masked mixer has none. Old versions of other models may have saved what is not needed; but
    weights that differ from the model's in the number of their layer alone are layers that
    config.json leaves out.
    """
    if not isinstance(model.config, MaskedMixerConfig):
        known = {without_numbers(name) for name in model.state_dict()}
        unknown = [name for name in unknown if without_numbers(name) in known]
    if unknown:
        raise UserError(
            f"checkpoint {directory} has weights that its config.json has no place for, "
            f"{', '.join(unknown[:3])}...: give the config.json that was saved with them"
        )


def without_numbers(name: str) -> str:
    """model.layers.3.mlp.weight -> model.layers.N.mlp.weight"""
    return re.sub(r"\.\d+(?=\.)", ".N", name)


def check_types(directory: Path, model: PreTrainedModel) -> None:
    """Raises UserError for parameters that are saved as integers, bool or complex numbers. Buffers
    of other models, such as masks, may be.
    """
    names = [f".{name}" for name, _ in model.named_parameters(remove_duplicate=False)]
    for saved, kind in weight_types(directory).items():
        is_parameter = any(name.endswith(f".{saved}") for name in names)
        if is_parameter and not kind.startswith(("F", "BF")):
            raise UserError(
                f"checkpoint {directory} has {saved} of type {kind}; allowed: floating-point "
                "numbers: give a checkpoint that training or save_pretrained wrote"
            )


def check_finite(source: Path, model: PreTrainedModel, remedy: str = "") -> None:
    """Raises UserError naming the weights that hold a NaN or an infinity."""
    bad = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if bad:
        remedy = remedy or "its training diverged, or the file is damaged: give another checkpoint"
        raise UserError(
            f"checkpoint {source} has weights that are not finite (NaN or infinite) in "
            f"{', '.join(bad[:3])}{', ...' if bad[3:] else ''}: {remedy}"
        )


def load_masked_mixer(directory: Path, problem: str) -> PreTrainedModel:
    """`load_model`, of a masked mixer alone, with or without a tokenizer beside it; see
    `check_masked_mixer`.
    """
    check_checkpoint(directory, tokenizer=False)
    config = load_model_config(directory)
    check_masked_mixer(directory, config, problem)
    return load_model(directory, config)


def check_masked_mixer(directory: Path, config: PreTrainedConfig, problem: str) -> None:
    """Raises UserError for another architecture; `problem` says what such a model is or lacks."""
    if not isinstance(config, MaskedMixerConfig):
        raise UserError(
            f"checkpoint {directory} is a {config.model_type}, {problem}: give one of a masked "
            "mixer"
        )


def load_model_config(directory: Path) -> PreTrainedConfig:
    """Raises UserError for a model that AutoModelForCausalLM cannot build, and for sizes below 1,
    which transformers does not refuse.
    """
    allowed = (
        "masked_mixer, or any causal language model that the installed transformers has "
        "(gpt2, llama, ...)"
    )
    try:
        config = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers and the hub client each raise their own kinds
        written = read_json(directory / "config.json", REMEDIES["config.json"])
        if written.get("model_type") == MaskedMixerConfig.model_type:
            raise UserError(
                f"checkpoint {directory} has a config.json that no masked mixer can have "
                f"({first_line(error)}): correct it, or copy the one that was saved with the model"
            ) from None
        raise UserError(
            f"checkpoint {directory} is of no architecture that can be evaluated "
            f"({first_line(error)}); allowed: {allowed}: "
            "check its config.json, model_type above all, or install the transformers that knows it"
        ) from None
    if type(config) not in AutoModelForCausalLM._model_mapping.keys():
        raise UserError(
            f"checkpoint {directory} is a {config.model_type}, which is not a causal language "
            f"model and has no perplexity; allowed: {allowed}: give another checkpoint"
        )
    sizes = {name: getattr(config.get_text_config(), name, None) for name in SIZES}
    wrong = [
        f"{name} {value}" for name, value in sizes.items() if isinstance(value, int) and value < 1
    ]
    if wrong:
        raise UserError(
            f"the config.json of checkpoint {directory} has {', '.join(wrong)}; allowed: 1 or "
            "more: correct it"
        )
    config.return_dict = True  # whatever the file says: callers read outputs by their names
    return config


def check_vocabulary(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, what: str, remedy: str
) -> None:
    """Raises UserError for a tokenizer that cannot be the model's, which may have more ids
    (padding), never less, nor so many more that it is another model's. what: names the tokenizer.
    """
    ids = vocabulary_size(tokenizer)
    if not ids <= vocab_size <= ids + LARGEST_PADDING:
        raise UserError(
            f"{what} has {ids} ids, the model {vocab_size}; allowed: as many, or up to "
            f"{LARGEST_PADDING} more in the model: {remedy}"
        )


def check_token(largest: int, model: PreTrainedModel, what: str) -> None:
    """Raises UserError for a token that the model does not have. what: names its text."""
    ids = model.config.get_text_config().vocab_size
    if largest >= ids:
        raise UserError(
            f"{what} has token {largest}, the model's vocabulary ends at {ids - 1}: give another "
            "text, or the tokenizer that the model was trained with"
        )
