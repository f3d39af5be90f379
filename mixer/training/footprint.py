"""The memory that a training step needs, and what to lower where it is too much."""

import os
from dataclasses import replace

import psutil
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mixer.common.errors import UserError
from mixer.common.hardware import memory_limit
from mixer.common.memory import out_of_memory
from mixer.data.prepared import Manifest
from mixer.distributed.world import World
from mixer.models.architecture import model_class, model_config
from mixer.training.compile import set_recompute
from mixer.training.config import RunConfig
from mixer.training.objective import Objective, build_objective
from mixer.training.optim import kinds_of


def needed_gb(run: RunConfig, data: Manifest, world: World) -> float:
    """The memory that one process needs, in units of 2^30 bytes. Raises UserError where it cannot
    fit.

    It is counted in passes over a model of tensors without numbers, which take no memory.
    """
    # No kernels of ours: those are for tensors with numbers.
    options = replace(run.model, mixing_backend="auto")
    config = model_config(options, data.vocab_size, data.eos_token_id)
    with FakeTensorMode():
        model = model_class(config)(config)
        set_recompute(model, run.train.recompute)
        kinds, kept = kinds_of(model), _bytes_kept(build_objective(model, run).train(), run)
    # Weights, gradients and the optimizer's state: AdamW's has two numbers for each weight, Muon's
    # has one.
    numbers = 4 * sum(parameter.numel() for parameter in model.parameters())
    if run.optim.name == "muon":
        numbers -= sum(matrix.numel() for matrix in kinds.matrices)
    state = 4 * numbers / (world.size if world.is_sharded else 1)
    limit = memory_limit(world.device)
    if world.device.type == "cuda":
        # Compiled code and kernels keep less; if that is still too much, the step will show.
        needed, certain = state + kept, state
    else:
        needed = certain = state + kept + psutil.Process().memory_info().rss
        limit /= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if certain > limit:
        raise UserError(
            f"training {run.directory} needs about {needed / 2**30:.1f} GB of memory in each "
            f"process, and there are {limit / 2**30:.1f}. {_remedy(run)}"
        )
    return needed / 2**30


def _bytes_kept(objective: Objective, run: RunConfig) -> int:
    """What a forward pass of a micro-batch keeps for the backward pass, beside the weights."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    shape = (run.train.batch_size, run.model.max_position_embeddings)
    tokens, mixed = torch.zeros(shape, dtype=torch.int64), run.train.mixed_precision != "no"
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        objective(tokens, tokens)
    for weight in objective.parameters():
        storages.pop(weight.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in storages.values())


def step_too_large(run: RunConfig, device: torch.device, error: BaseException) -> UserError:
    """The error of a run that is out of memory on this process's device: names its sizes, and the
    settings that would need less.
    """
    model = ("max_position_embeddings", "hidden_size", "num_hidden_layers")
    sizes = [f"train.batch_size = {run.train.batch_size}"]
    sizes = ", ".join(sizes + [f"model.{name} = {getattr(run.model, name)}" for name in model])
    return out_of_memory(error, device, f"training {run.directory}", sizes, _remedy(run))


def _remedy(run: RunConfig) -> str:
    """What would need less memory."""
    train, ways = run.train, []
    if train.batch_size > 1:
        ways.append(
            "lower train.batch_size and raise train.gradient_accumulation_steps by the same factor "
            "(the losses stay the same)"
        )
    if train.recompute != "block":
        ways.append(f"set train.recompute={'activation or ' * (train.recompute == 'none')}block")
    if train.mixed_precision == "no":
        ways.append("set train.mixed_precision=bf16")
    ways.append("choose a smaller model")
    return f"To need less: {'; or '.join(ways)}. Then give the same command again"
