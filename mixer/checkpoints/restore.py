"""Loading the state of a run from a checkpoint, or a new run's weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from mixer.checkpoints import pretrained
from mixer.checkpoints.checkpoint import FORMAT, OPTIMIZER, STATE, read_trainer
from mixer.checkpoints.model_files import check_checkpoint, refused, settled
from mixer.checkpoints.writer import local_part, optimizer_state
from mixer.common.errors import UserError, errors_about, first_line
from mixer.data.config import DataConfig
from mixer.data.tokenizer import existing_tokenizer, read_tokenizer, vocabulary_size
from mixer.distributed.world import World
from mixer.models.architecture import for_training, is_dropout, model_config, new_model
from mixer.models.config import ModelConfig
from mixer.models.masked_mixer.convolution import KeyedConv, TriangularConv

# What a resume may change in the model's configuration, what transformers records in it, and what
# a model from elsewhere may have: none of it changes what the weights compute.
MAY_DIFFER = {
    *("mixing_backend", "mixing_init"),
    *("architectures", "dtype", "transformers_version", "_name_or_path"),
    *("bos_token_id", "pad_token_id", "initializer_range"),
    # Which a class for causal models may set itself; that the model is causal is checked.
    *("is_decoder", "is_encoder_decoder"),
}


def load_trainer(checkpoint: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The content of trainer.json, if the run can continue from it.

    data: the run's entry of that name. Raises UserError where the checkpoint's differ.
    """
    trainer = read_trainer(checkpoint)
    if trainer.get("format") != FORMAT:
        raise UserError(
            f"checkpoint {checkpoint} has format {trainer.get('format', 1)}, but this code resumes "
            f"format {FORMAT}; resume it with the version that wrote it, or choose another name"
        )
    trainer = read_trainer(
        checkpoint,
        samples=int,
        skipped_steps=int,
        logged_tokens=int,
        nats=float | None,
        data=dict,
        settings=dict,
        earlier=dict,
        mixing={str: str},
        scaler=dict | None,
        wandb_id=str | None,
    )
    if differing := differences(trainer["data"], data):
        raise UserError(
            f"checkpoint {checkpoint} was trained on different data or in another order: "
            f"{differing}; restore them, choose another name to start afresh, or start a run of "
            f"another name from its weights: train.init_from={checkpoint}"
        )
    return trainer


def differences(saved: dict[str, Any], current: dict[str, Any]) -> str:
    """Names each key whose value differs between the checkpoint and the run."""
    return "; ".join(
        f"{key} is {saved.get(key)!r} in the checkpoint, now {current.get(key)!r}"
        for key in sorted(saved | current)
        if saved.get(key) != current.get(key)
    )


def load_matching_model(checkpoint: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The checkpoint's model in fp32, with the mixing backend of `config`. Raises UserError if it
    cannot be read, or has another configuration, naming each field that differs.
    """
    check_same_model(checkpoint, pretrained.load_model_config(checkpoint), config)
    model = for_training(pretrained.load_model(checkpoint, config))
    with torch.device("meta"):
        like_new = new_model(config)
    # Some have weights that are not trained, such as sines of positions, which loading forgets.
    for weight, new_weight in zip(model.parameters(), like_new.parameters(), strict=True):
        weight.requires_grad_(new_weight.requires_grad)
    return model


def check_same_model(checkpoint: Path, saved: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Raises UserError naming what differs between the checkpoint's configuration and a run's."""
    saved_values = _compared(saved)
    values = _compared(config)
    if type(saved) is not type(config):
        saved_values = {"model_type": saved.model_type}
        values = {"model_type": config.model_type}
    # A checkpoint from elsewhere may have entries that nothing reads.
    saved_values = {name: saved_values.get(name) for name in values}
    if differing := differences(saved_values, values):
        raise UserError(
            f"checkpoint {checkpoint} is of another model: {differing}; restore these (in model.*; "
            "for model_type, model.architecture; for vocab_size and eos_token_id, data.tokenizer "
            "or data.vocab_size), or choose another name or checkpoint"
        )


def _compared(config: PreTrainedConfig) -> dict[str, Any]:
    """The entries that decide what weights compute, as JSON has them: a file has no tuples."""
    values = {
        name: value
        for name, value in config.to_dict().items()
        if name not in MAY_DIFFER and not is_dropout(name, value)
    }
    return json.loads(json.dumps(values, default=str))


def take_backends(model: PreTrainedModel, mixing: dict[str, str], world: World) -> None:
    """Goes on with the backends that a run has begun with, as the entry `mixing` of trainer.json
    has them: another would round differently. While training timed both first, `auto` could stand
    for plain PyTorch also where our kernels run.
    """
    for entry, backend in mixing.items():
        if backend != "dense":
            continue
        world.say(f"mixing: auto uses dense, as the run did before ({entry})")
        for layer in model.modules():
            is_keyed = isinstance(layer, KeyedConv)
            if isinstance(layer, TriangularConv) and is_keyed == (entry == "keyed_backend"):
                layer.backend = backend


def check_start(directory: Path, model: ModelConfig, data: DataConfig) -> None:
    """Raises UserError for what `start_from` will refuse, as far as that is known before the data
    is prepared, and without loading weights.
    """
    tokenizer = None if data.tokenizer == "train" else existing_tokenizer(data.tokenizer)
    with errors_about("train.init_from"):
        directory = settled(directory)
        check_checkpoint(directory)
        saved = pretrained.load_model_config(directory)
    if tokenizer is None:
        # One that is trained will have at most so many ids.
        vocab_size = min(saved.get_text_config().vocab_size, data.vocab_size)
        eos_token_id = saved.eos_token_id
    else:
        vocab_size = vocabulary_size(tokenizer)
        eos_token_id = tokenizer.eos_token_id
    config = model_config(model, vocab_size, eos_token_id=None)
    config.eos_token_id = eos_token_id  # of a saved model, maybe several
    with errors_about("train.init_from"):
        check_same_model(directory, saved, config)
        if tokenizer is not None:
            check_same_tokenizer(directory, tokenizer)


@errors_about("train.init_from")
def start_from(
    directory: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    """A new model with the weights of a checkpoint or an exported model (train.init_from). Raises
    UserError if that is another model, has another tokenizer, or cannot be read.
    """
    directory = settled(directory)
    check_checkpoint(directory)
    model = load_matching_model(directory, config)
    check_same_tokenizer(directory, tokenizer)
    # As of a model with new weights: how its source writes texts stays there.
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def check_same_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises UserError unless a checkpoint has the tokenizer of the data."""
    if specification(read_tokenizer(str(directory))) != specification(tokenizer):
        raise UserError(
            f"checkpoint {directory} has another tokenizer than the data; set data.tokenizer="
            f"{directory} and data.directory to a new folder"
        )


def specification(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What decides which ids a text becomes."""
    left_out = dict.fromkeys(("truncation", "padding", "post_processor"))
    return json.loads(tokenizer.backend_tokenizer.to_str()) | left_out


def load_state(
    checkpoint: Path, trainer: dict, model: nn.Module, optimizer: Optimizer, world: World
) -> None:
    """Loads all state besides the model: the optimizer's and the loss scale. Steps draw no random
    numbers, and the order of the data has no state. Under FSDP the parameters are shards already.
    """
    try:
        load_optimizer(checkpoint, model, optimizer)
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
        problem = f"has a {STATE}/ that is not what training wrote ({first_line(error)})"
        raise refused(checkpoint, problem) from None
    scaler = world.accelerator.scaler
    if scaler is not None and trainer["scaler"]:
        scaler.load_state_dict(trainer["scaler"])


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Loads the optimizer's state into the one that it has begun with, sharded like the model. Only
    one whole tensor is in memory at a time.

    Raises ValueError unless the checkpoint has exactly the names and shapes of the optimizer.
    """
    state = optimizer_state(model, optimizer)
    with safe_open(checkpoint / OPTIMIZER, "pt") as saved:
        # What is lacking would begin with zeros.
        if odd := sorted(state.keys() ^ set(saved.keys())):
            raise ValueError(f"it {'lacks' if odd[0] in state else 'also has'} {odd[0]}")
        for name, target in state.items():
            value = saved.get_tensor(name)
            if value.shape != target.shape:
                raise ValueError(f"it has {name} of shape {value.shape}, expected {target.shape}")
            value = value.to(target.device)
            if isinstance(target, DTensor):
                value = distribute_tensor(value, target.device_mesh, target.placements)
            local_part(target).copy_(local_part(value))
