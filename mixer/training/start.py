"""What a run starts with: the state of its training, new or from a checkpoint, the memory and time
that it will take, and the record of what it trains with.
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
from mixer.checkpoints.checkpoint import earlier_settings, find_resume, remove_partial
from mixer.common.errors import UserError
from mixer.common.files import as_path, write_text
from mixer.common.hardware import lacks_bf16, memory_limit, product_flops
from mixer.common.terminal import counted
from mixer.common.values import as_yaml
from mixer.data.config import NOT_COMPARED, Manifest, unused_options
from mixer.data.prepare import Data
from mixer.distributed.world import World
from mixer.models.architecture import model_class, model_config
from mixer.models.retrieval import pair_keys
from mixer.training.backend import settle_backend
from mixer.training.config import RunConfig, flatten
from mixer.training.optim import build_optimizer, learning_rate
from mixer.training.passes import (
    HOPPER,
    Passes,
    build_objective,
    compile_objective,
    compiled,
    obstacle_to_graph,
    useful_flops,
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


def start_state(run: RunConfig, data: Data, world: World) -> State:
    """The model, its optimizer and the counters: new, or from the checkpoint to continue from."""
    resumed = find_checkpoint(run, world)
    torch.manual_seed(run.seed)
    config = model_config(run.model, data.manifest.vocab_size, data.manifest.eos_token_id)
    identity = data_identity(data.manifest, run.seed)
    trainer, counters, wandb_id = None, Counters(), None
    if resumed is None:
        model = model_class(config)(config)
        if run.train.init_from:
            restore.start_from(as_path(run.train.init_from), model, data.tokenizer)
    else:
        trainer = restore.load_trainer(resumed, identity)
        check_start(trainer, run.train.init_from)
        known = {"logged_tokens": trainer["tokens"], "nats": 0.0} | trainer
        counters = Counters(**{name: known[name] for name in asdict(counters)})
        model = restore.load_model(resumed, config)
        if resumed.resolve().parent == run.directory.resolve():  # and not another run's
            wandb_id = trainer["wandb_id"]
    record = start_record(run, trainer, world)
    raced = needs_race(run, world.device)
    record["mixing"] = settle_backend(model, run, trainer, world) if raced else {}
    passes, optimizer = parallelize(model, run, world)
    if resumed is not None:
        restore.resume(resumed, trainer, model, optimizer.optimizer, world)
    directory = used_settings(run)["data"].get("directory", "")
    recorded = {"data": identity, "data_directory": directory} | record
    return State(model, passes, optimizer, counters, recorded, resumed, wandb_id)


def check_pairs(data: Data, directory: str) -> None:
    """Raises UserError where contrastive training would have nothing to tell apart: all queries or
    all targets of a split, or of many pairs spread over it, are one text.
    """
    for split, pairs in (("train", data.training), ("validation", data.validation)):
        count = min(len(pairs), 1024)
        batch = pairs.batch([number * len(pairs) // count for number in range(count)])
        for side, keys in zip(("query", "target"), pair_keys(*batch), strict=True):
            if (keys == keys[0]).all():
                raise UserError(
                    f"the {split} split of {directory} has one {side} in "
                    f"{counted(count, 'pair')}, and a loss of 0; allowed: two different ones or "
                    "more. Give a text with others, or another data.validation_fraction, and "
                    "another data.directory"
                )


def find_checkpoint(run: RunConfig, world: World) -> Path | None:
    """The checkpoint to continue from, the same on all processes; None for a fresh start."""
    found = None
    if world.is_main:
        remove_partial(run.directory)
        found = find_resume(run.directory, run.checkpoint.resume, world.say)
    found = world.of_main(found)
    begins_in = found or run.directory
    world.require_shared(f"the directory {begins_in}", begins_in.is_dir())
    return found


def data_identity(manifest: Manifest, seed: int) -> dict[str, Any]:
    """What identifies the data and the order of its samples."""
    hashes = {f"{name}.bin": split.tokens_sha256 for name, split in manifest.splits.items()}
    settings = {f"data.{key}": value for key, value in manifest.settings.items()}
    tokenizer = {"tokenizer": manifest.tokenizer_sha256, "vocab_size": manifest.vocab_size}
    return settings | {"seed": seed} | tokenizer | hashes


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
    objective = build_objective(model, run, processes).to(world.device).train()
    is_compiled = compile_objective(objective, run.train, shape, world)
    compile = compiled if is_compiled and not world.is_sharded else None
    optimizer = build_optimizer(model, run.optim, processes, compile)
    prepare = world.accelerator.prepare
    if is_compiled and not obstacle_to_graph(run.train, world):
        if world.size > 1:
            # DDP would do it, too: hosts with other CPUs draw other initial weights.
            for tensor in objective.state_dict().values():
                dist.broadcast(tensor, 0)
        # in autocast, but not in DDP
        parallel = world.accelerator.prepare_model(objective, evaluation_mode=True)
        passes = Passes(parallel, world)
        passes.record(shape)
        return passes, prepare(optimizer)
    # DDP or FSDP, and autocast. FSDP replaces the parameters, also those in the optimizer.
    parallel, optimizer = prepare(objective, optimizer)
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        # DDP sums gradients bucket by bucket, and lays the buckets out anew after its first
        # backward pass. With three or more processes another layout means another order of summing.
        # Without this pass, whose gradients are dropped, the first step after a resume would differ
        # in its last bits from the same step of an uninterrupted run.
        tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
        parallel(tokens, tokens).sum().backward()
        parallel.zero_grad(set_to_none=True)
    return Passes(parallel, world), optimizer


# ------------------------------------------------------------------------- what it will take


SHORT = 512  # tokens


def needed_gb(run: RunConfig, data: Manifest, world: World) -> float:
    """The memory of a training step in one process, in units of 2^30 bytes.

    Raises UserError where a CPU does not have it: the system would kill the run without a word.
    """
    on_gpu = world.device.type == "cuda"
    weights, kept = weights_and_kept(run, data, on_gpu)
    # Beside each weight its gradient and the optimizer's state, AdamW's two numbers; on several
    # GPUs also the mean of their gradients (see Passes).
    has_means = on_gpu and world.size > 1 and not world.is_sharded
    state = (20 if has_means else 16) * weights
    needed = kept + state / (world.size if world.is_sharded else 1)
    if not on_gpu:
        needed += psutil.Process().memory_info().rss
        if needed > (limit := memory_limit(world.device)):
            raise UserError(
                f"training {run.directory} needs about {needed / 2**30:.1f} GB of memory, but "
                f"the limit is {limit / 2**30:.1f}. {less_memory(run, world.device)}"
            )
    return needed / 2**30


def less_memory(run: RunConfig, device: torch.device) -> str:
    """What to change for a run that needs less memory: all that helps and is not done already."""
    train, advice = run.train, []
    if train.batch_size > (2 if run.is_contrastive else 1):
        lower = "lower train.batch_size"
        if not run.is_contrastive:
            lower += " and raise train.gradient_accumulation_steps by the same factor (the losses "
            lower += "stay the same)"
        advice.append(lower)
    if train.recompute != "block":
        advice.append("set train.recompute=block")
    if train.mixed_precision == "no":
        advice.append(f"set train.mixed_precision={'fp16' if lacks_bf16(device) else 'bf16'}")
    advice.append("choose a smaller model")
    return f"To need less: {'; or '.join(advice)}. Then run the same command again"


def weights_and_kept(run: RunConfig, data: Manifest, on_gpu: bool) -> tuple[int, int]:
    """The number of weights, and the bytes that a step keeps for its backward pass: counted in a
    forward pass of tensors without numbers, which take no memory.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
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
        build_objective(model, run).train()(tokens, tokens)
    for weight in model.parameters():
        kept.pop(weight.untyped_storage()._cdata, None)
    return model.num_parameters(), sum(storage.nbytes() for storage in kept.values())


def banner(run: RunConfig, state: State, samples: int, memory: float, world: World) -> str:
    """What is printed before the first step."""
    parameters = state.model.num_parameters() / 1e6
    is_mixer, on_gpu = run.model.architecture == "masked_mixer", world.device.type == "cuda"
    mixing = run.model.mixing_backend if is_mixer else "attention"
    name = torch.cuda.get_device_name(world.device) if on_gpu else str(world.device)
    processes = counted(world.size, "process", "processes") + ", FSDP" * world.is_sharded
    batch = run.train.batch_size * run.train.gradient_accumulation_steps * world.size
    tokens = batch * run.sample_tokens  # of a step
    steps, left = run.train.steps, max(0, run.train.steps - state.counters.step)
    flops = left * tokens * useful_flops(state.model, run)
    seconds = flops / (world.size * product_flops(world.device, run.train.mixed_precision))
    time = timedelta(seconds=round(seconds))
    fresh = f"a start from {run.train.init_from}" if run.train.init_from else "a fresh start"
    begins = f"resuming {state.resumed}" if state.resumed else fresh
    begins += (
        ""
        if left
        else f", already finished ({counted(steps, 'step')}); raise train.steps to continue"
    )
    about = "up to" if on_gpu else "about"  # compiled code and kernels keep less
    lines = [
        f"{run.directory}: {parameters:.1f}M parameters, token mixing {mixing}, {processes} on "
        f"{name}",
        f"{counted(steps, 'step')} of {counted(tokens, 'token')}, {steps * batch / samples:.2f} "
        f"epochs of {counted(samples, 'sample')}",
        f"{about} {memory:.1f} GB of memory, at least {time}; {begins}",
    ]
    if left and (warmup := run.optim.warmup_steps) > steps:
        lines.append(f"optim.warmup_steps = {warmup} is cut to train.steps, {steps}")
    return "\n".join(lines)


# ------------------------------------------------------------------------- the record
# Checkpoints keep what a run trains with, so it is compared when the run goes on, and a start that
# trains nothing cannot change it.

SETTINGS = ("seed", "model", "data", "train", "optim")  # what decides what is trained
# What another start may change though no step is left: they do not change what was trained.
HARMLESS = {"train.steps", "processes"}
# What decides which state the optimizer has: no resume may change it.
OF_OPTIMIZER = {"optim.name", "train.objective"}


def start_record(run: RunConfig, trainer: dict | None, world: World) -> dict[str, Any]:
    """The entries `settings` and `earlier` of trainer.json (mixer/checkpoints/checkpoint.py) for a
    run that goes on from the checkpoint of `trainer`, or begins. Changed settings are said.

    Raises UserError where settings are changed that decide the optimizer's state, or where no step
    is left to train with them.
    """
    known = used_settings(run)
    settings = {name: known[name] for name in SETTINGS} | {"processes": world.size}
    settings["data"] = {k: v for k, v in known["data"].items() if k not in NOT_COMPARED}
    if trainer is None:
        return {"settings": settings, "earlier": {}}
    before, now = dict(flatten(trainer.get("settings", {}))), dict(flatten(settings))
    before.pop("train.init_from", None)  # see check_start
    changed = {key: before[key] for key in before if key in now and before[key] != now[key]}
    step, earlier = trainer["step"], trainer.get("earlier", {})
    listed = ", ".join(f"{key} = {now[key]} (was {old})" for key, old in changed.items())
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


def check_start(trainer: dict[str, Any], now: str) -> None:
    """Raises UserError unless train.init_from is `now` the folder that the run of trainer.json has
    begun from: a run that goes on has those weights, and reads no others.
    """
    before = dict(flatten(trainer.get("settings", {}))).get("train.init_from", now)
    folders = {os.path.realpath(as_path(name)) for name in (before, now)}
    if before == now or (before and now and len(folders) == 1):
        return
    began = f"from {before}" if before else "without it"
    restore = f"set train.init_from={before}" if before else "leave it out"
    raise UserError(
        f"train.init_from = {now!r}, but the run has begun {began}: {restore}, or choose another "
        "name without checkpoint.resume to start afresh"
    )


def _warn_of_rate(run: RunConfig, changed: dict[str, Any], step: int, world: World) -> None:
    """Says where the learning rate rises after `step`, as the settings were others before."""
    options = {key.partition(".")[2]: changed[key] for key in changed if key.startswith("optim.")}
    optim, steps = replace(run.optim, **options), changed.get("train.steps", run.train.steps)
    last = learning_rate(optim, min(step, steps - 1), steps)
    now = learning_rate(run.optim, step, run.train.steps)
    if now > 1.1 * last:
        world.say(
            f"the learning rate jumps from {last:.3g} to {now:.3g}: the loss may rise. To continue "
            f"at the old rate set optim.schedule=constant optim.lr={last:.3g} optim.warmup_steps=0;"
            " for one schedule over all steps, train again under another name"
        )


def used_settings(run: RunConfig) -> dict[str, Any]:
    """The configuration without the options that its source of data does not use."""
    known = asdict(run)
    for name in unused_options(run.data):
        del known["data"][name]
    return known


def save_config(run: RunConfig, path: Path, earlier: dict[str, dict[str, Any]]) -> None:
    """The resolved configuration as YAML, and in comments what earlier steps had in its place."""
    comments = "".join(f"# {line}\n" for line in earlier_settings(earlier))
    write_text(path, comments + as_yaml(used_settings(run)))
