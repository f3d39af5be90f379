"""The memory that training needs, and what to lower where it is too much."""

import os
from dataclasses import dataclass, replace

import psutil
import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mixer.common.errors import UserError
from mixer.common.hardware import memory_limit
from mixer.common.memory import out_of_memory
from mixer.data.manifest import Manifest
from mixer.models.architecture import model_class, model_config
from mixer.training.config import RunConfig
from mixer.training.objective import Objective
from mixer.training.optim import kinds_of
from mixer.training.parallelize import set_recompute


@dataclass
class Memory:
    """What one process needs, in bytes."""

    state: float  # weights, gradients and the optimizer's state
    kept: float  # of the forward pass, for the backward pass; less where it is compiled
    program: float  # the process itself, on a CPU

    @property
    def gb(self) -> float:
        return (self.state + self.kept + self.program) / 2**30


def needed_memory(run: RunConfig, data: Manifest, accelerator: Accelerator) -> Memory:
    """What a step needs. Raises UserError where it cannot fit.

    It is counted in passes over a model of tensors without numbers, which take no memory.
    """
    # No kernels of ours: those are for tensors with numbers.
    options = replace(run.model, mixing_backend="auto")
    config = model_config(options, data.vocab_size, data.eos_token_id)
    with FakeTensorMode():
        model = model_class(config)(config)
        set_recompute(model, run.train.recompute)
        kinds, kept = kinds_of(model), _bytes_kept(Objective(model).train(), run)
    numbers = 4 * sum(parameter.numel() for parameter in model.parameters())
    if run.optim.name == "muon":  # has one number of state for each weight, AdamW two
        numbers -= sum(matrix.numel() for matrix in kinds.matrices)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    shards = accelerator.num_processes if sharded else 1
    on_gpu = accelerator.device.type == "cuda"
    program = 0 if on_gpu else psutil.Process().memory_info().rss
    memory = Memory(4 * numbers / shards, kept, program)
    _require_fit(run, memory, accelerator.device)
    return memory


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


def _require_fit(run: RunConfig, memory: Memory, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    limit = memory_limit(device) / (1 if on_gpu else int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    # Compiled code and kernels of a GPU keep less; if that is still too much, the step will show.
    if memory.state + memory.kept * (not on_gpu) > limit:
        state, has = memory.state / 2**30, limit / 2**30
        raise UserError(
            f"training {run.directory} needs about {memory.gb:.1f} GB of memory in each process "
            f"({state:.1f} of them for weights, gradients and the optimizer), and there are "
            f"{has:.1f}. {_remedy(run)}"
        )


def step_too_large(run: RunConfig, device: torch.device, error: BaseException) -> UserError:
    """The error of a run that is out of memory on this process's device: names its sizes, and the
    settings that would need less.
    """
    train, model = run.train, run.model
    sizes = {
        "train.batch_size": train.batch_size,
        "train.gradient_accumulation_steps": train.gradient_accumulation_steps,
        "train.recompute": train.recompute,
        "train.mixed_precision": train.mixed_precision,
        "model.max_position_embeddings": model.max_position_embeddings,
        "model.hidden_size": model.hidden_size,
        "model.num_hidden_layers": model.num_hidden_layers,
    }
    listed = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    return out_of_memory(error, device, f"training {run.directory}", listed, _remedy(run))


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
