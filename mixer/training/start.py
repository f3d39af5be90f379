"""What a run starts with: its data, and the state of its training, new or from a checkpoint."""

from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mixer.checkpoints import restore
from mixer.checkpoints.format import remove_partial
from mixer.common.hardware import peak_tflops, product_flops
from mixer.common.say import Say
from mixer.data.manifest import Manifest
from mixer.data.prepare import prepare
from mixer.data.token_file import TokenFile
from mixer.data.tokenizer import load_tokenizer, token_bytes
from mixer.distributed.hosts import Hosts
from mixer.models.architecture import model_class, model_config
from mixer.training.config import RunConfig
from mixer.training.memory import Memory, needed_memory
from mixer.training.metrics import Metrics
from mixer.training.mixing import settle_mixing
from mixer.training.optim import optimizer_identity
from mixer.training.parallelize import parallelize
from mixer.training.record import save_config, start_record


@dataclass
class Data:
    """The prepared data of a run."""

    manifest: Manifest
    training: TokenFile
    validation: TokenFile
    tokenizer: PreTrainedTokenizerBase
    token_bytes: np.ndarray  # (vocabulary,): of the text that each token stands for


@dataclass
class Progress:
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
    """What training changes, on this process."""

    model: PreTrainedModel
    parallel: nn.Module  # the model with its loss, in DDP or FSDP
    optimizer: AcceleratedOptimizer
    progress: Progress
    recorded: dict  # the entries of trainer.json that a resume compares
    memory: Memory  # what a step needs
    mixing: dict | None  # which backend mixes the tokens, where the run has chosen; trainer.json
    resumed: Path | None  # the checkpoint that all this comes from
    wandb_id: str | None


def prepare_data(run: RunConfig, hosts: Hosts, say: Say) -> Data:
    """Prepares the data unless it is there. All processes call this: one per host prepares, while
    the others wait for its file lock.
    """
    manifest = prepare(run.data, say)
    hosts.require_shared(f"data.directory = {run.data.directory}", manifest.fingerprint)
    context = run.model.max_position_embeddings
    training, validation = (
        TokenFile(run.data.directory, split, context, say) for split in ("train", "validation")
    )
    tokenizer = load_tokenizer(run.data.directory)
    tokenizer.model_max_length = context  # saved with the model, for tools that cut texts by it
    return Data(manifest, training, validation, tokenizer, token_bytes(tokenizer))


def start_state(
    run: RunConfig, data: Data, accelerator: Accelerator, hosts: Hosts, say: Say
) -> State:
    """The model, its optimizer and the progress: new, or from the checkpoint to continue from."""
    resumed = find_checkpoint(run, accelerator, hosts, say)
    memory = needed_memory(run, data.manifest, accelerator)
    set_seed(run.seed)
    config = model_config(run.model, data.manifest.vocab_size, data.manifest.eos_token_id)
    identity = {
        "data": restore.identity(data.manifest, run.seed),
        "optimizer": optimizer_identity(run.optim),
    }
    trainer, progress, wandb_id = {}, Progress(), None
    if resumed is None:
        model = model_class(config)(config)
        if run.train.init_from:
            source = Path(run.train.init_from)
            hosts.require_shared(f"train.init_from = {source}", source.is_dir())
            restore.start_from(source, model, data.tokenizer)
    else:
        allow_other_data = run.checkpoint.allow_other_data
        trainer = restore.load_trainer(
            resumed, **identity, allow_other_data=allow_other_data, say=say
        )
        restore.warn_of_threads(trainer, accelerator.device, say)
        known = {"logged_tokens": trainer["tokens"], "nats": 0.0} | trainer
        progress = Progress(**{name: known[name] for name in asdict(progress)})
        model = restore.load_model(resumed, config)
        if resumed.resolve().parent == run.directory.resolve():  # and not another run's
            wandb_id = trainer["wandb_id"]
    earlier = trainer if resumed else None
    record = start_record(run, accelerator.num_processes, earlier, say)
    mixing = settle_mixing(model, run, earlier, accelerator, hosts, say)
    parallel, optimizer = parallelize(model, run, accelerator, hosts, say)
    if resumed is not None:
        restore.resume(resumed, trainer, model, optimizer.optimizer, accelerator)
    recorded = identity | asdict(record)
    return State(model, parallel, optimizer, progress, recorded, memory, mixing, resumed, wandb_id)


def find_checkpoint(
    run: RunConfig, accelerator: Accelerator, hosts: Hosts, say: Say
) -> Path | None:
    """The checkpoint to continue from, the same on all processes; None for a fresh start."""
    found = None
    if accelerator.is_main_process:
        remove_partial(run.directory, say)
        found = restore.find_resume(run.directory, run.checkpoint.resume, say)
    found = hosts.of_main(found)
    begins_in = found or run.directory
    hosts.require_shared(f"the directory {begins_in}", begins_in.is_dir())
    return found


def start_metrics(run: RunConfig, state: State, owes_evaluation: bool, say: Say) -> Metrics:
    """The metrics of the main process, without the lines of steps that are to be done again.

    owes_evaluation: whether the validation loss of the current step is yet to be written.
    """
    if state.progress.step < run.train.steps:  # else it stays as it is
        save_config(run, run.directory / "config.yaml", state.recorded["earlier"])
    metrics = Metrics(run.directory, run.logging, asdict(run), state.wandb_id)
    again = {"validation_loss"} if owes_evaluation else set()
    metrics.rewind(state.progress.step, again, say)
    return metrics


def banner(run: RunConfig, accelerator: Accelerator, state: State, samples: int) -> str:
    """What is printed before the first step: the model, the devices and the data."""
    parameters = sum(p.numel() for p in state.model.parameters()) / 1e6
    is_mixer = run.model.architecture == "masked_mixer"
    mixing = run.model.mixing_backend if is_mixer else "attention"
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    if device.type == "cuda" and not peak_tflops(device, run.train.mixed_precision):
        name += ", whose peak rate is not known"
    engine = ", FSDP" if accelerator.distributed_type == DistributedType.FSDP else ""
    batch = run.train.batch_size * run.train.gradient_accumulation_steps * accelerator.num_processes
    fresh = f"a start from {run.train.init_from}" if run.train.init_from else "a fresh start"
    begins = f"resuming {state.resumed}" if state.resumed else fresh
    step, steps = state.progress.step, run.train.steps
    tokens = batch * run.model.max_position_embeddings
    rate = accelerator.num_processes * product_flops(device, run.train.mixed_precision)
    left = max(0, steps - step) * tokens * state.model.flops_per_token()["useful"]
    memory = f"{'about' if device.type == 'cpu' else 'up to'} {state.memory.gb:.1f} GB of memory"
    if step >= steps:
        begins += f", which has {step} steps: train.steps = {steps} leaves none to train"
    return (
        f"{run.directory}: {parameters:.1f}M parameters, token mixing {mixing}, "
        f"{accelerator.num_processes} process(es){engine} on {name}\n"
        f"{steps:,} steps of {tokens:,} tokens, {steps * batch / samples:.2f} epochs of "
        f"{samples:,} samples\n"
        f"{memory}, at least {timedelta(seconds=round(left / rate))}; {begins}"
    )
