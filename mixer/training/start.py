"""What a run starts with: its data, its model and its optimizer, new or from a checkpoint."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedConfig, PreTrainedModel

from mixer.checkpoints import restore
from mixer.checkpoints.checkpoint import all_checkpoints, find_resume, remove_partial
from mixer.checkpoints.settings import changed_settings, in_words, new_record
from mixer.common.errors import UserError, first_line
from mixer.common.files import as_path
from mixer.common.hardware import lacks_bf16
from mixer.common.progress import time_reported
from mixer.data.config import TASKS
from mixer.data.prepare import Data
from mixer.distributed.shards import shard
from mixer.distributed.world import Group, World
from mixer.models.architecture import blocks_of, check_causal, check_sizes, model_config, new_model
from mixer.objectives.objective import Loss
from mixer.training.config import RunConfig, used_configuration
from mixer.training.optim import begin_state, build_optimizer, jump_of_rate
from mixer.training.passes import (
    Passes,
    compile_loss,
    compiled,
    obstacle_to_graph,
    set_recompute,
)


@dataclass
class Counters:
    """How far a run is; saved in every checkpoint."""

    step: int = 0
    samples: int = 0  # position in the data: samples used by all processes
    tokens: int = 0  # target tokens trained on
    # Steps whose gradients were not finite: fp16 overflows, or train.non_finite=skip.
    skipped_steps: int = 0
    logged_tokens: int = 0  # `tokens` at the last line of metrics
    nats: float | None = 0.0  # of the tokens since then; None if that is not finite

    @classmethod
    def of_trainer(cls, trainer: dict[str, Any]) -> "Counters":
        return cls(**{item.name: trainer[item.name] for item in fields(cls)})


@dataclass
class State:
    """A run as it starts, on this process. Training changes the model, the optimizer and the
    counters; the rest stays as it is.
    """

    model: PreTrainedModel
    passes: Passes  # of the model with its loss
    optimizer: AcceleratedOptimizer
    counters: Counters
    record: dict[str, Any]  # entries of trainer.json, the same in all later checkpoints
    resumed: Path | None  # the checkpoint that all this comes from
    wandb_id: str | None


def check_run(run: RunConfig, world: World) -> None:
    """Raises UserError for options that this device or these processes cannot train with."""
    device = world.device
    precision = run.train.mixed_precision
    if precision == "fp16" and device.type == "cpu":
        raise UserError("train.mixed_precision = 'fp16' on a CPU; set train.mixed_precision=no")
    if precision == "bf16" and (name := lacks_bf16(device)):
        problem = f"train.mixed_precision = 'bf16', but {name} has no bf16 arithmetic"
        raise UserError(f"{problem}; set train.mixed_precision=fp16")
    if run.model.mixing_backend == "cuda" and device.type != "cuda":
        raise UserError(
            f"model.mixing_backend is cuda, but training is on the {device.type}; allowed there: "
            "auto, dense"
        )
    check_model(run)


def check_weights(run: RunConfig) -> None:
    """Raises UserError for a checkpoint that the run cannot begin from, or go on from."""
    if run.checkpoint.resume != "auto" or all_checkpoints(run.directory):
        find_resume(run.directory, run.checkpoint.resume, say=lambda line: None)
    elif run.train.init_from:
        restore.check_start(as_path(run.train.init_from), run.model, run.data)


def check_model(run: RunConfig) -> None:
    """Raises UserError for a model.config that makes no model, before its data is prepared."""
    if run.model.architecture != "auto":
        return
    config = model_config(run.model, run.data.vocab_size, eos_token_id=None)
    try:
        # Of sizes of 0, which are refused below.
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model = new_model(config)
    except Exception as error:  # each model raises its own kinds
        problem = f"{config.model_type} cannot be built: {first_line(error)}"
        raise UserError(f"model.config: {problem}") from None
    check_sizes(model)
    if run.train.recompute == "block" and not model.supports_gradient_checkpointing:
        raise UserError(
            f"train.recompute = block, which {config.model_type} does not have; allowed: none"
        )


def open_run_data(run: RunConfig, world: World) -> Data:
    """The run's data, prepared at first: by one process of each host, while the others wait for its
    lock. Raises UserError for data that the run cannot be trained on, and before hours of
    preparation for weights that it cannot begin from.
    """
    is_prepared = (as_path(run.data.directory) / "manifest.json").is_file()
    if not is_prepared and run.data.source not in TASKS:
        if world.is_main:
            check_weights(run)
        world.of_main(None)  # the others wait for it
    data = run.build_objective().open_data(world.say)
    world.require_shared(f"data.directory = {run.data.directory}", data.manifest.fingerprint)
    return data


def start_state(run: RunConfig, data: Data, world: World) -> State:
    """The model, its optimizer and the counters: new, or from the checkpoint to continue from."""
    record = new_record(used_configuration(run), data.manifest, world.size)
    checkpoint = find_checkpoint(run, world)
    if checkpoint is not None:
        return resumed_state(checkpoint, record, run, data, world)
    config = model_config(run.model, data.manifest.vocab_size, data.manifest.eos_token_id)
    with time_reported("building the model", world.say):
        model = whole_or_meta(lambda: initial_model(run, config, data), config, world)
    passes, optimizer = passes_and_optimizer(model, run, world)
    return State(model, passes, optimizer, Counters(), record, None, None)


def find_checkpoint(run: RunConfig, world: World) -> Path | None:
    """The checkpoint that a run continues from (`find_resume`), the same on all processes; None for
    a fresh start. What a killed save left in the run's directory is deleted.
    """
    checkpoint = None
    if world.is_main:
        remove_partial(run.directory)
        checkpoint = find_resume(run.directory, run.checkpoint.resume, world.say)
    checkpoint = world.of_main(checkpoint)
    begins_in = checkpoint or run.directory
    world.require_shared(f"the directory {begins_in}", begins_in.is_dir())
    return checkpoint


def resumed_state(
    checkpoint: Path, record: dict[str, Any], run: RunConfig, data: Data, world: World
) -> State:
    """What a checkpoint holds; record: entries of the next trainer.json, of a run without earlier
    steps. Raises UserError for a checkpoint that the run cannot continue from.
    """
    trainer = restore.load_trainer(checkpoint, record["data"])
    config = model_config(run.model, data.manifest.vocab_size, data.manifest.eos_token_id)
    with time_reported(f"loading {checkpoint}", world.say):
        model = whole_or_meta(
            lambda: restore.load_matching_model(checkpoint, config), config, world
        )
    counters = Counters.of_trainer(trainer)
    step = counters.step
    record["earlier"] = trainer["earlier"]
    changed = changed_settings(record["settings"], trainer)
    if changed and step < run.train.steps:
        record["earlier"] = trainer["earlier"] | {str(step): changed}
        world.say(f"settings from step {step + 1} on: {in_words(changed, record['settings'])}")
        if jump := jump_of_rate(run.optim, run.train.steps, changed, step):
            world.say(jump)
    if run.model.mixing_backend == "auto":
        record["mixing"] = trainer["mixing"]
        restore.take_backends(model, trainer["mixing"], world)
    passes, optimizer = passes_and_optimizer(model, run, world)
    with time_reported("loading the optimizer's state", world.say):
        restore.load_state(checkpoint, trainer, model, optimizer.optimizer, world)
    is_own = checkpoint.resolve().parent == run.directory.resolve()  # and not another run's
    wandb_id = trainer["wandb_id"] if is_own else None
    return State(model, passes, optimizer, counters, record, checkpoint, wandb_id)


def whole_or_meta(
    build: Callable[[], PreTrainedModel], config: PreTrainedConfig, world: World
) -> PreTrainedModel:
    """The model that `build` makes. Where FSDP shards it, processes other than the main one get
    one of the same configuration on the meta device, where tensors have no memory.
    """
    if world.is_main or not world.is_sharded:
        return build()
    with torch.device("meta"):
        return new_model(config)


def initial_model(run: RunConfig, config: PreTrainedConfig, data: Data) -> PreTrainedModel:
    """The model in fp32 on the CPU, with new weights or those of train.init_from."""
    if run.train.init_from:
        return restore.start_from(as_path(run.train.init_from), config, data.tokenizer)
    torch.manual_seed(run.seed)
    return new_model(config)


def passes_and_optimizer(
    model: PreTrainedModel, run: RunConfig, world: World
) -> tuple[Passes, AcceleratedOptimizer]:
    """The passes of the model with its loss, on all processes, and its optimizer. The model moves
    to the device; with FSDP its parameters become shards on the devices.
    """
    with time_reported("compiling the model, and setting up its optimizer", world.say):
        shape = (run.train.batch_size, run.model.max_position_embeddings)
        group = dist.group.WORLD if world.size > 1 else None
        loss = loss_on_device(model, run, group, world)
        is_compiled = compile_loss(loss, run, shape, world)
        if world.is_sharded:
            shard_loss(loss, world)
        compiles_optimizer = is_compiled and not world.is_sharded
        optimizer = build_optimizer(
            model, run.optim, group, compiled if compiles_optimizer else None
        )
        if is_compiled and not obstacle_to_graph(run, world):
            passes = recorded_passes(loss, shape, world)
            wrapped_optimizer: Any = world.accelerator.prepare(optimizer)
        else:
            passes, wrapped_optimizer = wrapped_passes(loss, optimizer, shape, world)
        begin_state(optimizer)
    return passes, wrapped_optimizer


def loss_on_device(model: PreTrainedModel, run: RunConfig, group: Group, world: World) -> Loss:
    """The model with its loss, to train. Where FSDP is to shard it, it stays where it is. Raises
    UserError for a model of transformers that sees later tokens.
    """
    set_recompute(model, run.train.recompute)
    loss = run.build_objective().loss(model, group).train()
    if not world.is_sharded:
        loss.to(world.device)
    if run.model.architecture == "auto" and model.device.type != "meta":
        check_causal(model)
    return loss


def shard_loss(loss: Loss, world: World) -> None:
    """Turns the parameters of the model into shards, block by block."""
    model = loss.model
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    assert head is not None  # of a causal language model
    if embedding.weight is head.weight:
        shard(loss, blocks_of(model), [embedding, head], world)
    else:
        shard(loss, [*blocks_of(model), embedding], [head], world)


def recorded_passes(loss: Loss, shape: tuple[int, int], world: World) -> Passes:
    """The passes as a CUDA graph, for batches of `shape`, (batch, tokens): in autocast, without
    DDP.
    """
    if world.size > 1:
        # DDP would do it, too: hosts with other CPUs draw other initial weights.
        for tensor in loss.state_dict().values():
            dist.broadcast(tensor, 0)
    passes = Passes(world.accelerator.prepare_model(loss, evaluation_mode=True), world)
    passes.record(shape)
    return passes


def wrapped_passes(
    loss: Loss, optimizer: Optimizer, shape: tuple[int, int], world: World
) -> tuple[Passes, AcceleratedOptimizer]:
    """The passes without a CUDA graph, in DDP or FSDP and in autocast, and the optimizer as
    accelerate wraps it beside them.
    """
    if world.is_sharded:
        parallel = loss
        wrapped_optimizer: Any = world.accelerator.prepare_optimizer(optimizer)
    else:
        if world.size > 1 and has_unused_weights(loss, shape, world):
            # Else DDP would wait for their gradients. It looks for them in each step.
            ddp_options = world.accelerator.ddp_handler
            assert ddp_options is not None  # see build_accelerator
            ddp_options.find_unused_parameters = True
        parallel, wrapped_optimizer = world.accelerator.prepare(loss, optimizer)
    if world.size > 1:
        warm_up(parallel, shape, world)
    return Passes(parallel, world), wrapped_optimizer


def has_unused_weights(loss: Loss, shape: tuple[int, int], world: World) -> bool:
    """Whether some weights get no gradient: a model may have a part that it does not run."""
    tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
    with world.accelerator.autocast():
        loss(tokens, tokens).sum().backward()
    weights = [weight for weight in loss.parameters() if weight.requires_grad]
    is_unused = any(weight.grad is None for weight in weights)
    loss.zero_grad(set_to_none=True)
    return is_unused


def warm_up(parallel: nn.Module, shape: tuple[int, int], world: World) -> None:
    """A forward and a backward pass whose gradients are dropped; parallel: the loss in DDP or FSDP.

    DDP sums gradients bucket by bucket, and lays the buckets out anew after its first backward
    pass. With three or more processes another layout means another order of summing: without this
    pass, the first step after a resume would differ in its last bits from the same step of an
    uninterrupted run. FSDP's blocks are compiled in it.
    """
    tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
    parallel(tokens, tokens).sum().backward()
    parallel.zero_grad(set_to_none=True)
