"""What train.compile and train.cuda_graphs stand for where they are auto: the best that can run."""

import importlib.util
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator, DistributedType

from mixer.common.errors import UserError
from mixer.distributed.hosts import Hosts
from mixer.training.config import TrainConfig

COMPILES_FROM = (7, 0)  # compute capability, of Triton 3.2 to 3.7 (dev/LOG.md)


@dataclass(frozen=True)
class Environment:
    """What the choice depends on: devices and processes."""

    device: str  # cuda or cpu
    capability: tuple[int, int] = (0, 0)  # of the GPU
    has_triton: bool = False
    is_sharded: bool = False  # FSDP


@dataclass
class Chosen:
    """The two settings, and a line about those that were auto; an empty one on a CPU."""

    compile: str
    cuda_graphs: bool
    said: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        return f"auto: {', '.join(self.said)}" if self.said else ""


def find_environment(accelerator: Accelerator, hosts: Hosts) -> Environment:
    """All processes must call this together; all get the same answer."""
    device = accelerator.device
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    if device.type != "cuda":
        return Environment(device.type, is_sharded=is_sharded)
    capabilities = hosts.gather(torch.cuda.get_device_capability(device))
    triton = all(hosts.gather(importlib.util.find_spec("triton") is not None))
    return Environment("cuda", min(capabilities), triton, is_sharded)


def choose(train: TrainConfig, environment: Environment) -> Chosen:
    """The settings as they are given, and for auto what can run here.

    Raises UserError for CUDA graphs that were asked for and cannot be had.
    """
    compile, no_compile = _compile(train, environment)
    graphs, no_graphs = _graphs(train, environment, compile)
    chosen = Chosen(compile, graphs)
    if environment.device != "cuda":
        return chosen  # auto is for GPUs: nothing is missing
    if train.compile == "auto":
        chosen.said.append(_said("train.compile", compile, no_compile))
    if train.cuda_graphs == "auto":
        chosen.said.append(_said("train.cuda_graphs", str(graphs).lower(), no_graphs))
    return chosen


def _said(name: str, value: str, reason: str) -> str:
    return f"{name}={value} ({reason})" if reason else f"{name}={value}"


def _compile(train: TrainConfig, environment: Environment) -> tuple[str, str]:
    """(train.compile, why auto is "no")."""
    if train.compile != "auto":
        return train.compile, ""
    if environment.device != "cuda":
        return "no", "it pays on GPUs"
    if environment.capability < COMPILES_FROM:
        return "no", "Triton needs compute capability 7.0"
    if not environment.has_triton:
        return "no", "Triton is not installed"
    return "blocks", ""


def _graphs(train: TrainConfig, environment: Environment, compile: str) -> tuple[bool, str]:
    """(train.cuda_graphs, why auto is false)."""
    reason = ""
    if environment.device != "cuda":
        reason = "they are for GPUs"
    elif environment.is_sharded:
        reason = "FSDP moves the weights"
    elif compile == "no":
        reason = "they are made of what is compiled"
    elif train.gradient_accumulation_steps > 1:
        reason = "each backward pass would overwrite the gradients of the one before"
    elif train.recompute == "block":
        reason = "blocks that are computed again cannot be recorded"
    if train.cuda_graphs == "true":
        _require_graphs(environment, reason)
    if train.cuda_graphs != "auto":
        return train.cuda_graphs == "true", ""
    return not reason, reason


def _require_graphs(environment: Environment, reason: str) -> None:
    where = ""
    if environment.is_sharded:
        where = "with FSDP, whose weights move"
    elif environment.device != "cuda":
        where = f"on a {environment.device.upper()}"
    elif reason:
        where = f"here: {reason}"
    if where:
        raise UserError(
            f"train.cuda_graphs = true {where}; allowed on CUDA GPUs with or without DDP; set "
            "train.cuda_graphs=auto"
        )
