"""What a run starts with, in four parts: the set-up of its data, model and optimizer, new or from a
checkpoint; the record of the settings that it trains with; an estimate of the memory and time that
it takes; and the banner that announces it.
"""

import os
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from transformers import PreTrainedModel

from mixer.checkpoints import restore
from mixer.checkpoints.checkpoint import earlier_settings
from mixer.common.errors import UserError
from mixer.common.files import as_path, write_text
from mixer.common.hardware import check_precision, lacks_bf16, memory_limit, product_flops
from mixer.common.terminal import counted
from mixer.common.values import as_yaml
from mixer.data.config import NOT_COMPARED, Manifest, unused_options
from mixer.data.prepare import Data
from mixer.distributed.world import World
from mixer.models.architecture import model_class, model_config
from mixer.training.backend import check_backend, settle_backend
from mixer.training.config import RunConfig, flatten
from mixer.training.optim import build_optimizer, check_optimizer, learning_rate
from mixer.training.passes import (
    HOPPER,
    Passes,
    build_loss,
    compile_loss,
    compiled,
    obstacle_to_graph,
    useful_flops,
)

# ------------------------------------------------------------------------- set-up


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
        """Those of a checkpoint's trainer.json; earlier versions wrote fewer of them."""
        return cls(
            step=trainer["step"],
            samples=trainer["samples"],
            tokens=trainer["tokens"],
            skipped_steps=trainer["skipped_steps"],
            logged_tokens=trainer.get("logged_tokens", trainer["tokens"]),
            nats=trainer.get("nats", 0.0),
        )


@dataclass
class State:
    """What training changes, on this process, and what its checkpoints hold beside that."""

    model: PreTrainedModel
    passes: Passes  # of the model with its loss
    optimizer: AcceleratedOptimizer
    counters: Counters
    recorded: dict[str, Any]  # the entries of trainer.json that stay as they are
    resumed: Path | None  # the checkpoint that all this comes from
    wandb_id: str | None


def check_run(run: RunConfig, world: World) -> None:
    """Raises UserError for options that this device or these processes cannot train with."""
    check_precision(world.device, run.train.mixed_precision)
    check_optimizer(run.optim, world.is_sharded)
    check_backend(run, world.device)


def open_run_data(run: RunConfig, world: World) -> Data:
    """The run's data, prepared at first: by one process of each host, while the others wait for its
    lock. Raises UserError for data that the run cannot be trained on.
    """
    data = run.objective.open_data(world.say)
    world.require_shared(f"data.directory = {run.data.directory}", data.manifest.fingerprint)
    return data


def start_state(run: RunConfig, data: Data, world: World) -> State:
    """The model, its optimizer and the counters: new, or from the checkpoint to continue from."""
    checkpoint = restore.find_checkpoint(run.directory, run.checkpoint.resume, world)
    identity = restore.data_identity(data.manifest, run.seed)
    trainer = None
    if checkpoint is not None:
        trainer = restore.load_trainer(checkpoint, identity)
        check_init_from(trainer, run.train.init_from)
    model = build_model(run, data, checkpoint)
    record = settings_record(run, trainer, world)
    mixing = {}
    if needs_race(run, world.device):
        mixing = settle_backend(model, run, trainer, world)
    passes, optimizer = parallelize(model, run, world)
    counters = Counters()
    wandb_id = None
    if checkpoint is not None:
        restore.resume(checkpoint, trainer, model, optimizer.optimizer, world)
        counters = Counters.of_trainer(trainer)
        if checkpoint.resolve().parent == run.directory.resolve():  # and not another run's
            wandb_id = trainer["wandb_id"]
    directory = used_settings(run)["data"].get("directory", "")
    recorded = {"data": identity, "data_directory": directory, **record, "mixing": mixing}
    return State(model, passes, optimizer, counters, recorded, checkpoint, wandb_id)


def build_model(run: RunConfig, data: Data, checkpoint: Path | None) -> PreTrainedModel:
    """The model in fp32 on the CPU, with new weights, or those of train.init_from or of the
    checkpoint.
    """
    torch.manual_seed(run.seed)
    config = model_config(run.model, data.manifest.vocab_size, data.manifest.eos_token_id)
    if checkpoint is not None:
        return restore.load_model(checkpoint, config)
    model = model_class(config)(config)
    if run.train.init_from:
        restore.start_from(as_path(run.train.init_from), model, data.tokenizer)
    return model


def needs_race(run: RunConfig, device: torch.device) -> bool:
    """Whether a race decides which backend mixes tokens: on GPUs where nobody has timed them."""
    on_gpu = device.type == "cuda" and run.model.mixing_backend == "auto"
    return on_gpu and torch.cuda.get_device_capability(device) != HOPPER


def parallelize(
    model: PreTrainedModel, run: RunConfig, world: World
) -> tuple[Passes, AcceleratedOptimizer]:
    """The passes of the model with its loss, ready to train on all processes, and its optimizer.
    The model moves to the device, and under FSDP its parameters become shards.
    """
    shape = (run.train.batch_size, run.model.max_position_embeddings)
    processes = dist.group.WORLD if world.size > 1 else None
    loss = build_loss(model, run, processes).to(world.device).train()
    is_compiled = compile_loss(loss, run, shape, world)
    compile = compiled if is_compiled and not world.is_sharded else None
    optimizer = build_optimizer(model, run.optim, processes, compile)
    prepare = world.accelerator.prepare
    if is_compiled and not obstacle_to_graph(run, world):
        if world.size > 1:
            # DDP would do it, too: hosts with other CPUs draw other initial weights.
            for tensor in loss.state_dict().values():
                dist.broadcast(tensor, 0)
        # in autocast, but not in DDP
        parallel = world.accelerator.prepare_model(loss, evaluation_mode=True)
        passes = Passes(parallel, world)
        passes.record(shape)
        return passes, prepare(optimizer)
    # DDP or FSDP, and autocast. FSDP replaces the parameters, also those in the optimizer.
    parallel, optimizer = prepare(loss, optimizer)
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        # DDP sums gradients bucket by bucket, and lays the buckets out anew after its first
        # backward pass. With three or more processes another layout means another order of summing.
        # Without this pass, whose gradients are dropped, the first step after a resume would differ
        # in its last bits from the same step of an uninterrupted run.
        tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
        parallel(tokens, tokens).sum().backward()
        parallel.zero_grad(set_to_none=True)
    return Passes(parallel, world), optimizer


# ------------------------------------------------------------------------- record of settings
# Checkpoints keep what a run trains with, so it is compared when the run goes on, and a start that
# trains nothing cannot change it.

SETTINGS = ("seed", "model", "data", "train", "optim")  # what decides what is trained
# What another start may change though no step is left: they do not change what was trained.
HARMLESS = {"train.steps", "processes"}
# What decides which state the optimizer has: no resume may change it.
OF_OPTIMIZER = {"optim.name", "train.objective"}


def settings_record(run: RunConfig, trainer: dict | None, world: World) -> dict[str, Any]:
    """The entries `settings` and `earlier` of trainer.json (mixer/checkpoints/checkpoint.py) for a
    run that goes on from the checkpoint of `trainer`, or begins. Changed settings are said.

    Raises UserError where settings are changed that decide the optimizer's state, or where no step
    is left to train with them.
    """
    used = used_settings(run)
    settings = {name: used[name] for name in SETTINGS} | {"processes": world.size}
    settings["data"] = {k: v for k, v in used["data"].items() if k not in NOT_COMPARED}
    if trainer is None:
        return {"settings": settings, "earlier": {}}
    before = dict(flatten(trainer.get("settings", {})))
    after = dict(flatten(settings))
    before.pop("train.init_from", None)  # see check_init_from
    changed = {key: before[key] for key in before if key in after and before[key] != after[key]}
    listed = ", ".join(f"{key} = {after[key]} (was {old})" for key, old in changed.items())
    step = trainer["step"]
    earlier = trainer.get("earlier", {})
    if changed.keys() & OF_OPTIMIZER:
        raise UserError(
            f"the run has the state of another optimizer: {listed}; restore it, or choose "
            "another name to start afresh"
        )
    if step >= run.train.steps:
        if changed.keys() - HARMLESS:
            raise UserError(
                f"the checkpoint has {counted(step, 'step')}, which were trained with other "
                f"settings: {listed}. Restore these, raise train.steps to continue, or choose "
                "another name without checkpoint.resume to start afresh"
            )
    elif changed:
        world.say(f"settings from step {step + 1} on: {listed}")
        _warn_of_rate(run, changed, step, world)
        earlier = earlier | {str(step): changed}
    return {"settings": settings, "earlier": earlier}


def check_init_from(trainer: dict[str, Any], init_from: str) -> None:
    """Raises UserError unless `init_from` is the folder that the run of trainer.json has begun
    from: a run that goes on has those weights, and reads no others.
    """
    recorded = dict(flatten(trainer.get("settings", {}))).get("train.init_from", init_from)
    folders = {os.path.realpath(as_path(name)) for name in (recorded, init_from)}
    if recorded == init_from or (recorded and init_from and len(folders) == 1):
        return
    began = f"from {recorded}" if recorded else "without it"
    remedy = f"set train.init_from={recorded}" if recorded else "leave it out"
    raise UserError(
        f"train.init_from = {init_from!r}, but the run has begun {began}: {remedy}, or choose "
        "another name without checkpoint.resume to start afresh"
    )


def _warn_of_rate(run: RunConfig, changed: dict[str, Any], step: int, world: World) -> None:
    """Says where the learning rate rises after `step`, as the settings were others before."""
    options = {}
    for key, value in changed.items():
        section, _, name = key.partition(".")
        if section == "optim":
            options[name] = value
    steps = changed.get("train.steps", run.train.steps)
    old_rate = learning_rate(replace(run.optim, **options), min(step, steps - 1), steps)
    new_rate = learning_rate(run.optim, step, run.train.steps)
    if new_rate > 1.1 * old_rate:
        world.say(
            f"the learning rate jumps from {old_rate:.3g} to {new_rate:.3g}: the loss may rise. To "
            f"continue at the old rate set optim.schedule=constant optim.lr={old_rate:.3g} "
            "optim.warmup_steps=0; for one schedule over all steps, train again under another name"
        )


def used_settings(run: RunConfig) -> dict[str, Any]:
    """The configuration without the options that its source of data does not use."""
    settings = asdict(run)
    for name in unused_options(run.data):
        del settings["data"][name]
    return settings


def save_config(run: RunConfig, path: Path, earlier: dict[str, dict[str, Any]]) -> None:
    """The resolved configuration as YAML, and in comments what earlier steps had in its place."""
    comments = "".join(f"# {line}\n" for line in earlier_settings(earlier))
    write_text(path, comments + as_yaml(used_settings(run)))


# ------------------------------------------------------------------------- estimate


SHORT = 512  # tokens


def needed_gb(run: RunConfig, data: Manifest, world: World) -> float:
    """The memory of a training step in one process, in units of 2^30 bytes.

    Raises UserError where a CPU does not have it: the system would kill the run without a word.
    """
    on_gpu = world.device.type == "cuda"
    weights, activation_bytes = weights_and_activations(run, data, on_gpu)
    # Beside each weight its gradient and the optimizer's state, AdamW's two numbers; on several
    # GPUs also the mean of their gradients (see Passes).
    has_means = on_gpu and world.size > 1 and not world.is_sharded
    state_bytes = (20 if has_means else 16) * weights
    needed = activation_bytes + state_bytes / (world.size if world.is_sharded else 1)
    if not on_gpu:
        needed += psutil.Process().memory_info().rss
        limit = memory_limit(world.device)
        if needed > limit:
            raise UserError(
                f"training {run.directory} needs about {needed / 2**30:.1f} GB of memory, but "
                f"the limit is {limit / 2**30:.1f}. {less_memory(run, world.device)}"
            )
    return needed / 2**30


def less_memory(run: RunConfig, device: torch.device) -> str:
    """What to change for a run that needs less memory: all that helps and is not done already."""
    train = run.train
    advice = []
    compares_samples = run.objective.compares_samples
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


def weights_and_activations(run: RunConfig, data: Manifest, on_gpu: bool) -> tuple[int, int]:
    """The number of weights, and the bytes that a step keeps for its backward pass: counted in a
    forward pass of tensors without numbers, which take no memory.
    """
    activations: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        activations[storage._cdata] = storage
        return tensor

    # No kernels of ours: those are for tensors with numbers.
    plain = replace(run.model, mixing_backend="auto")
    config = model_config(plain, data.vocab_size, data.eos_token_id)
    # Kernels keep nothing for each pair of tokens; of short texts plain PyTorch keeps little.
    context = run.model.max_position_embeddings
    length = min(context, SHORT) if on_gpu else context
    shape = (run.train.batch_size * -(-context // length), length)
    with (
        FakeTensorMode(),
        torch.autocast("cpu", torch.bfloat16, enabled=run.train.mixed_precision != "no"),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model = model_class(config)(config)
        tokens = torch.zeros(shape, dtype=torch.int64)
        build_loss(model, run).train()(tokens, tokens)
    for weight in model.parameters():
        activations.pop(weight.untyped_storage()._cdata, None)
    return model.num_parameters(), sum(storage.nbytes() for storage in activations.values())


def least_time(run: RunConfig, state: State, steps: int, world: World) -> timedelta:
    """For `steps` steps, whose arithmetic would run as fast as a matrix product does here."""
    tokens = steps * step_samples(run, world) * run.objective.sample_tokens
    flops = tokens * useful_flops(state.model, run)
    flops_per_second = world.size * product_flops(world.device, run.train.mixed_precision)
    return timedelta(seconds=round(flops / flops_per_second))


def step_samples(run: RunConfig, world: World) -> int:
    """The samples of a step of all processes."""
    return run.train.batch_size * run.train.gradient_accumulation_steps * world.size


# ------------------------------------------------------------------------- banner


def banner(run: RunConfig, state: State, samples: int, memory_gb: float, world: World) -> str:
    """What is printed before the first step. samples: of the training split; memory_gb: of
    `needed_gb`.
    """
    on_gpu = world.device.type == "cuda"
    parameters = state.model.num_parameters() / 1e6
    is_mixer = run.model.architecture == "masked_mixer"
    mixing = run.model.mixing_backend if is_mixer else "attention"
    processes = counted(world.size, "process", "processes")
    if world.is_sharded:
        processes += ", FSDP"
    device_name = torch.cuda.get_device_name(world.device) if on_gpu else str(world.device)
    steps = run.train.steps
    steps_left = max(0, steps - state.counters.step)
    batch_samples = step_samples(run, world)
    sample_tokens = run.objective.sample_tokens
    epochs = steps * batch_samples / samples
    bound = "up to" if on_gpu else "about"  # compiled code and kernels keep less
    time = least_time(run, state, steps_left, world)
    begins = _beginning(run, state)
    if not steps_left:
        begins += f", already finished ({counted(steps, 'step')}); raise train.steps to continue"
    lines = [
        f"{run.directory}: {parameters:.1f}M parameters, token mixing {mixing}, {processes} on "
        f"{device_name}",
        f"{counted(steps, 'step')} of {counted(batch_samples * sample_tokens, 'token')}, "
        f"{epochs:.2f} epochs of {counted(samples, 'sample')}",
        f"{bound} {memory_gb:.1f} GB of memory, at least {time}; {begins}",
    ]
    warmup_steps = run.optim.warmup_steps
    if steps_left and warmup_steps > steps:
        lines.append(f"optim.warmup_steps = {warmup_steps} is cut to train.steps, {steps}")
    return "\n".join(lines)


def _beginning(run: RunConfig, state: State) -> str:
    if state.resumed:
        return f"resuming {state.resumed}"
    return f"a start from {run.train.init_from}" if run.train.init_from else "a fresh start"
