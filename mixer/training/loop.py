"""Training, from a configuration to the last checkpoint: one visible loop."""

import errno
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed

from mixer.checkpoints import restore
from mixer.checkpoints.format import remove_partial
from mixer.checkpoints.writer import CheckpointWriter
from mixer.common.errors import UserError
from mixer.common.files import run_locked
from mixer.common.hardware import check_precision, peak_tflops
from mixer.data.batches import Batches, Share, to_device
from mixer.data.order import SampleOrder
from mixer.data.prepare import prepare
from mixer.data.token_file import TokenFile
from mixer.data.tokenizer import load_tokenizer
from mixer.distributed.engine import build_accelerator, settle_buckets, sum_by_copy_engines
from mixer.distributed.hosts import Hosts, leave_with_error
from mixer.distributed.shards import whole
from mixer.distributed.stop import Stop
from mixer.models.architecture import model_class, model_config
from mixer.training.config import RunConfig, save_config
from mixer.training.console import Console
from mixer.training.guard import Guard, require_finite, where_not_finite
from mixer.training.metrics import Metrics
from mixer.training.objective import Objective, compile_objective, compiled, set_recompute
from mixer.training.optim import build_optimizer, check_optimizer, learning_rate, set_learning_rate
from mixer.training.telemetry import Profiler, Timer
from mixer.training.validation import validation_loss

DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
)


@dataclass
class Progress:
    """Where a run stands; saved in every checkpoint."""

    step: int = 0
    samples: int = 0  # position in the data: samples consumed by all processes
    tokens: int = 0  # target tokens trained on
    skipped_steps: int = (
        0  # steps whose gradients were not finite: fp16 overflows, or train.non_finite=skip
    )


def train(run: RunConfig) -> None:
    """Trains `run` on all processes of the launch, going on from its newest complete checkpoint."""
    transformers.utils.logging.disable_progress_bar()
    accelerator = build_accelerator(run.train.mixed_precision)
    try:
        with run_locked(run.directory) if accelerator.is_main_process else nullcontext():
            _train(run, accelerator)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            error = UserError(
                f"the run in {run.directory} has ended: {error}; make space or give access, then give the same command again: "
                "it goes on from the last save"
            )
        if accelerator.num_processes > 1:
            leave_with_error(error)
        raise error
    accelerator.end_training()


def _train(run: RunConfig, accelerator: Accelerator) -> None:
    device, main = accelerator.device, accelerator.is_main_process
    check_precision(device, run.train.mixed_precision)
    check_optimizer(run.optim, accelerator)
    torch.backends.cuda.matmul.allow_tf32 = run.train.tf32
    hosts, console = Hosts(accelerator), Console(accelerator, run.train.steps)

    # Data. Every process asks; one per node prepares while the others wait at the file lock.
    manifest = prepare(run.data, progress=console.say)
    hosts.require_shared(f"data.directory = {run.data.directory}", manifest.fingerprint)
    context = run.model.max_position_embeddings
    training = TokenFile(run.data.directory, "train", context)
    validation = TokenFile(run.data.directory, "validation", context)
    tokenizer = load_tokenizer(run.data.directory)
    tokenizer.model_max_length = context  # saved with the model, for tools that cut or warn by it

    # Model and optimizer, new or from a checkpoint.
    if main:
        remove_partial(run.directory, console.say)
    resumed = hosts.of_main(
        restore.find_resume(run.directory, run.checkpoint.resume, console.say) if main else None
    )
    begins_in = resumed or run.directory
    hosts.require_shared(f"the directory {begins_in}", begins_in.is_dir())
    set_seed(run.seed)
    config = model_config(run.model, manifest.vocab_size, manifest.eos_token_id)
    data = restore.identity(manifest, run.seed)
    state = (
        restore.load_trainer(resumed, data, {}, run.checkpoint.allow_other_data, console.say)
        if resumed
        else {}
    )
    model = restore.load_model(resumed, config) if resumed else model_class(config)(config)
    set_recompute(model, run.train.recompute)
    objective = Objective(model).to(device).train()
    shape = (run.train.batch_size, context)
    is_compiled = compile_objective(
        objective, run.train.compile, run.train.cuda_graphs, shape, accelerator, hosts, console.say
    )
    processes = dist.group.WORLD if hosts.processes > 1 else None
    faster = partial(compiled, graphs=False) if is_compiled else lambda function: function
    parallel, prepared = accelerator.prepare(
        objective, build_optimizer(model, run.optim, processes, faster)
    )  # DDP or FSDP, and autocast
    optimizer = prepared.optimizer  # torch's own, inside accelerate's
    if run.train.all_reduce == "copy_engines":
        sum_by_copy_engines(parallel, accelerator, hosts)
    settle_buckets(parallel, accelerator, shape)
    progress = (
        Progress(**{name: state[name] for name in asdict(Progress())}) if resumed else Progress()
    )
    scaler = accelerator.scaler
    if resumed:
        restore.resume(resumed, state, model, optimizer, accelerator)
    # A run killed between saving and evaluation owes the evaluation; made again, it gives the same
    # numbers.
    owes_evaluation = not resumed or evaluation_due(run, progress.step)
    metrics = None
    if main:
        save_config(run, run.directory / "config.yaml")
        goes_on = (
            resumed is not None and resumed.resolve().parent == run.directory.resolve()
        )  # or begins from another run's
        metrics = Metrics(
            run.directory, run.logging, asdict(run), state["wandb_id"] if goes_on else None
        )
        metrics.rewind(progress.step, again={"validation_loss"} if owes_evaluation else set())
    console.say(_banner(run, accelerator, model, training, resumed, progress))

    # What works beside the loop.
    share = Share(
        run.train.batch_size, run.train.gradient_accumulation_steps, hosts.processes, hosts.rank
    )
    batches = Batches(
        training,
        SampleOrder(len(training), run.seed),
        share,
        progress.samples,
        pin=device.type == "cuda",
    )
    writer = CheckpointWriter(
        run.directory, run.checkpoint, accelerator, hosts, model, tokenizer, console.say
    )
    stop_at_first = run.train.non_finite == "stop"
    guard = Guard(optimizer, scaler is not None, stop_at_first, device)
    profiler = Profiler(
        run.directory,
        run.logging.profile_step,
        run.logging.profile_steps if main else 0,
        console.say,
    )
    timer, stop, uncounted = Timer(), Stop(hosts), 0

    def backward(batch, step_targets) -> torch.Tensor:
        """Forward and backward pass of a micro-batch; returns its loss, the nats of all its
        targets.
        """
        nats = parallel(*batch).sum()
        # The engine takes the mean over processes; times their number it is the mean over all
        # target tokens.
        accelerator.backward(nats * (hosts.processes / step_targets))
        return nats.detach()

    def settle() -> None:
        """Takes from the device what steps have counted there; raises UserError where gradients end
        the run.
        """
        nonlocal uncounted
        progress.tokens, uncounted = progress.tokens + int(uncounted), 0
        found = guard.look()
        progress.skipped_steps += found.steps

        def trace(step: int) -> str:
            micro_batches = batches.at(
                progress.samples - (progress.step - step + 1) * share.step_samples
            )
            sharded = accelerator.distributed_type == DistributedType.FSDP
            again = [to_device(batch, device) for batch in micro_batches]
            own_gradients = nullcontext() if sharded else accelerator.no_sync(parallel)
            return where_not_finite(
                model,
                lambda batch: backward(batch, share.step_samples * context),
                again,
                own_gradients,
                hosts,
            )

        require_finite(found, run.train.max_skipped_steps, stop_at_first, scaler is not None, trace)

    def save() -> None:
        extra = {
            "data_directory": run.data.directory,
            "data": data,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "wandb_id": metrics.wandb_id if metrics else None,
        }
        writer.save(optimizer, asdict(progress) | extra)

    def evaluate() -> None:
        loss, bits = validation_loss(
            parallel, validation, run.train.eval_samples, run.train.batch_size, accelerator
        )
        if metrics:
            line = {"step": progress.step, "tokens": progress.tokens}
            metrics.write(line | {"validation_loss": loss, "validation_bits_per_byte": bits})
            writer.link_best(metrics.validation_losses)
        console.say(f"step {progress.step}: validation loss {loss:.4f}, {bits:.4f} bits per byte")

    try:
        if owes_evaluation:
            with timer.paused():
                evaluate()
        console.begin(progress.step)
        while progress.step < run.train.steps:
            stop.ask()
            profiler.before_step(progress.step + 1)
            rate = learning_rate(run.optim, progress.step, run.train.steps)
            set_learning_rate(optimizer, rate)
            with timer.waiting():
                micro_batches = [to_device(batch, device) for batch in batches.next()]
            if run.data.packed:
                step_targets = share.step_samples * context
            else:
                step_targets = accelerator.reduce(
                    sum((targets != -100).sum() for _, targets in micro_batches), "sum"
                )

            loss_sum = torch.zeros((), device=device)
            for micro, batch in enumerate(micro_batches, 1):
                with (
                    nullcontext() if micro == len(micro_batches) else accelerator.no_sync(parallel)
                ):
                    loss_sum += backward(batch, step_targets)
            gradient_norm = whole(
                accelerator.clip_grad_norm_(
                    parallel.parameters(), run.train.max_grad_norm or math.inf
                )
            )
            guard.before_step(
                gradient_norm, progress.step + 1
            )  # skips what is not finite, on the device
            writer.before_update()
            prepared.step()
            prepared.zero_grad(set_to_none=True)

            progress.step += 1
            progress.samples += share.step_samples
            uncounted += step_targets
            timer.step(share.step_samples * context)
            profiler.after_step(progress.step)
            writer.check()
            console.step(progress.step)

            done = progress.step == run.train.steps
            if progress.step % run.logging.log_every == 0 or done:
                settle()
                loss = float(accelerator.reduce(loss_sum, "sum") / step_targets)
                line = {"step": progress.step, "tokens": progress.tokens, "loss": loss, "lr": rate}
                line |= {"grad_norm": float(gradient_norm), "skipped_steps": progress.skipped_steps}
                line |= {"loss_scale": scaler.get_scale()} if scaler is not None else {}
                line |= timer.window(
                    model.flops_per_token()["useful"], accelerator, run.train.mixed_precision
                )
                if metrics:
                    metrics.write(line)
                console.line(line)
            stopping = stop.agreed()
            save_every = run.checkpoint.save_every
            saving = (
                stopping
                or (done and run.checkpoint.save_last)
                or (save_every and progress.step % save_every == 0)
            )
            evaluating = evaluation_due(run, progress.step)
            if saving or evaluating:
                settle()  # waits: steps still queued on a GPU are training time
            with timer.paused():  # saving and evaluation are not
                if saving:
                    save()  # first: an evaluation that fails must not cost the checkpoint
                if evaluating:
                    evaluate()
            if stopping and not done:
                writer.wait()
                console.say(
                    f"stopped by a signal after step {progress.step}; the same command goes on from there"
                )
                break
        writer.close()
    finally:
        writer.abandon()  # nothing, unless an error ends the run
        batches.close()
        profiler.close()
        console.close()
        stop.close()
    if metrics:
        metrics.close()


def evaluation_due(run: RunConfig, step: int) -> bool:
    every = run.train.eval_every
    return step == run.train.steps or (every > 0 and step % every == 0)


def _banner(
    run: RunConfig,
    accelerator: Accelerator,
    model,
    training: TokenFile,
    resumed,
    progress: Progress,
) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    peak = (
        ""
        if peak_tflops(device, run.train.mixed_precision)
        else "; its peak is not known, so no share of it is reported"
    )
    batch = run.train.batch_size * run.train.gradient_accumulation_steps * accelerator.num_processes
    mixing = "attention" if run.model.architecture == "llama" else run.model.mixing_backend
    done = progress.step >= run.train.steps
    nothing_left = (
        f", which has {progress.step} steps: train.steps = {run.train.steps} leaves none to train"
        if done
        else ""
    )
    engine = {DistributedType.FSDP: ", FSDP"}.get(accelerator.distributed_type, "")
    return (
        f"{run.directory}: {parameters / 1e6:.1f}M parameters, token mixing {mixing}, "
        f"{accelerator.num_processes} process(es){engine} on {name}{peak}\n"
        f"{len(training):,} samples of {run.model.max_position_embeddings} tokens, {batch} a step; "
        f"{'resuming ' + str(resumed) if resumed else 'a fresh start'}{nothing_left}"
    )
