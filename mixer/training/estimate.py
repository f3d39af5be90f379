"""What a run will need: an estimate of its memory, and what to change for one that needs less."""

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mixer.common.errors import UserError
from mixer.common.hardware import lacks_bf16, memory_limit
from mixer.data.config import Manifest
from mixer.distributed.world import World
from mixer.models.architecture import blocks_of, model_config, new_model
from mixer.models.masked_mixer.convolution import KeyedConv, TriangularConv
from mixer.objectives.config import traits_of
from mixer.training.config import RunConfig


def needed_gb(run: RunConfig, data: Manifest, world: World) -> float:
    """The memory of a training step in one process, in units of 2^30 bytes, roughly.

    Raises UserError where a CPU does not have it: the system would kill the run without a word.
    """
    on_gpu = world.device.type == "cuda"
    config = model_config(run.model, data.vocab_size, data.eos_token_id)
    with torch.device("meta"):  # where tensors have no memory
        model = new_model(config)
    # Beside each weight its gradient and the optimizer's state, AdamW's two numbers; on several
    # GPUs also the mean of their gradients (see Passes).
    has_means = on_gpu and world.size > 1 and not world.is_sharded
    state_bytes = (20 if has_means else 16) * model.num_parameters()
    needed = activation_bytes(model, run, on_gpu)
    needed += state_bytes / (world.size if world.is_sharded else 1)
    if not on_gpu:
        needed += psutil.Process().memory_info().rss
        limit = memory_limit(world.device)
        if needed > limit:
            raise UserError(
                f"training {run.directory} needs about {needed / 2**30:.1f} GB of memory, but "
                f"the limit is {limit / 2**30:.1f}. {less_memory(run, world.device)}"
            )
    return needed / 2**30


def activation_bytes(model: PreTrainedModel, run: RunConfig, on_gpu: bool) -> float:
    """What a step keeps for its backward pass, of a model of any architecture."""
    config = model.config
    blocks = len(blocks_of(model))
    number_bytes = 4 if run.train.mixed_precision == "no" else 2
    context = run.model.max_position_embeddings
    objective = run.build_objective()
    tokens = run.train.batch_size * objective.sample_tokens

    # In fp32 the softmax of the logits and its gradient.
    token_bytes = 2 * 4 * config.vocab_size if objective.reads_logits else 0
    if run.train.recompute == "block":
        token_bytes += number_bytes * blocks * config.hidden_size  # the input of each
        return tokens * token_bytes
    # What goes into and comes out of each linear layer, and of both norms of a block one of these.
    head = model.get_output_embeddings()
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, Conv1D)) and layer is not head:
            token_bytes += number_bytes * sum(layer.weight.shape)
    token_bytes += number_bytes * blocks * 2 * config.hidden_size
    if run.train.recompute == "activation":  # without that of the MLP
        token_bytes -= number_bytes * blocks * config.intermediate_size
    # Plain PyTorch also keeps numbers for pairs of tokens: the weights of a convolution, by lag in
    # rows twice as long, of a short window those of one panel (see plain.mix_by_lag); and of keyed
    # mixing, in each text, its scores and how well tokens match.
    texts = tokens // context
    pair_bytes = 0
    for layer in model.modules():
        if isinstance(layer, TriangularConv) and not on_gpu:
            rows = layer.window if context > 2 * layer.window else context
            squares = 1 if hasattr(layer, "weight") else 2
            if isinstance(layer, KeyedConv):
                squares = 2 * texts
            pair_bytes += number_bytes * layer.heads * squares * rows**2
    return tokens * token_bytes + pair_bytes


def less_memory(run: RunConfig, device: torch.device) -> str:
    """What to change for a run that needs less memory: all that helps and is not done already."""
    train = run.train
    advice = []
    compares_samples = traits_of(train, run.data).compares_samples
    if train.batch_size > (2 if compares_samples else 1):
        lower = "lower train.batch_size"
        if not compares_samples:
            lower += " and raise train.gradient_accumulation_steps by the same factor (the losses "
            lower += "stay the same)"
        advice.append(lower)
    if train.recompute != "block":
        advice.append("set train.recompute=block")
    if train.mixed_precision == "no":
        advice.append(f"set train.mixed_precision={'fp16' if lacks_bf16(device) else 'bf16'}")
    advice.append("choose a smaller model")
    return f"To need less: {'; or '.join(advice)}. Then run the same command again"
