"""The training loop: steps, metrics, evaluations and checkpoints, to the last step or a signal."""

import math
from contextlib import nullcontext
from dataclasses import asdict

import torch
import transformers
from accelerate import Accelerator, DistributedType
from transformers import PreTrainedModel

from mixer.checkpoints.writer import CheckpointWriter
from mixer.common.errors import UserError, is_refusal
from mixer.common.files import run_locked
from mixer.common.hardware import check_precision
from mixer.common.memory import is_out_of_memory
from mixer.data.batches import Batches, Share, to_device
from mixer.data.order import SampleOrder
from mixer.distributed.engine import build_accelerator
from mixer.distributed.hosts import Hosts, leave_with_error
from mixer.distributed.stop import Stop
from mixer.training.clipping import clip, gradient_norm
from mixer.training.config import RunConfig
from mixer.training.console import Console
from mixer.training.guard import Guard, require_finite, where_not_finite
from mixer.training.memory import step_too_large
from mixer.training.optim import check_optimizer, learning_rate, set_learning_rate
from mixer.training.start import banner, prepare_data, start_metrics, start_state
from mixer.training.telemetry import Profiler, Timer
from mixer.training.validation import validation_loss


def train(run: RunConfig) -> PreTrainedModel:
    """Trains `run` on all processes of the launch, from its newest complete checkpoint on. Returns
    the model, which FSDP has sharded.

    Raises UserError for settings that cannot work here, for too little memory or a disk that cannot
    be written to, and for gradients that end the run. With several processes, one that fails ends
    its process instead.
    """
    transformers.utils.logging.disable_progress_bar()
    accelerator = build_accelerator(run.train.mixed_precision)
    try:
        check_precision(accelerator.device, run.train.mixed_precision)
        check_optimizer(run.optim, accelerator)
        with run_locked(run.directory) if accelerator.is_main_process else nullcontext():
            model = _train(run, accelerator)
    except BaseException as error:
        if is_out_of_memory(error):
            error = step_too_large(run, accelerator.device, error)
        elif is_refusal(error):
            error = UserError(
                f"the run in {run.directory} has ended: {error}; make space or give access, then "
                "give the same command again: it goes on from the last save"
            )
        if accelerator.num_processes > 1:
            leave_with_error(error)
        raise error
    accelerator.end_training()
    return model


def _train(run: RunConfig, accelerator: Accelerator) -> PreTrainedModel:
    device, main, scaler = accelerator.device, accelerator.is_main_process, accelerator.scaler
    torch.backends.cuda.matmul.allow_tf32 = run.train.tf32
    hosts, console = Hosts(accelerator), Console(accelerator, run.train.steps)
    data = prepare_data(run, hosts, console.say)
    state = start_state(run, data, accelerator, hosts, console.say)
    model, parallel, progress = state.model, state.parallel, state.progress
    # A run that was killed between a save and its evaluation makes up for the evaluation.
    owes_evaluation = state.resumed is None or evaluation_due(run, progress.step)
    metrics = start_metrics(run, state, owes_evaluation, console.say) if main else None
    console.say(banner(run, accelerator, state, len(data.training)))

    share = Share(
        run.train.batch_size, run.train.gradient_accumulation_steps, hosts.processes, hosts.rank
    )
    step_tokens = share.step_samples * run.model.max_position_embeddings
    order, pin = SampleOrder(len(data.training), run.seed), device.type == "cuda"
    batches = Batches(data.training, order, share, progress.samples, pin)
    writer = CheckpointWriter(
        run.directory, run.checkpoint, accelerator, hosts, model, data.tokenizer, console.say
    )
    stop_at_first = run.train.non_finite == "stop"
    guard = Guard(state.optimizer.optimizer, scaler is not None, stop_at_first, device)
    profile_steps = run.logging.profile_steps if main else 0
    profiler = Profiler(run.directory, run.logging.profile_step, profile_steps, console.say)
    timer, stop = Timer(), Stop(hosts)
    uncounted = 0  # target tokens that are counted on the device, and not yet in `progress`

    def backward(batch, step_targets) -> torch.Tensor:
        """The forward and backward pass of a micro-batch; returns the sum of its nats."""
        nats = parallel(*batch).sum()
        # DDP and FSDP take the mean of the processes' gradients. The factor turns it into the
        # gradient of the mean over all target tokens of the step.
        accelerator.backward(nats * (hosts.processes / step_targets))
        return nats.detach()

    def trace(step: int) -> str:
        """Where the numbers that are not finite come from, by repeating a step."""
        steps_ago = progress.step - step + 1
        repeated = batches.at(progress.samples - steps_ago * share.step_samples)
        repeated = [to_device(batch, device) for batch in repeated]
        sharded = accelerator.distributed_type == DistributedType.FSDP
        own_gradients = nullcontext() if sharded else accelerator.no_sync(parallel)

        def run_both_passes(batch) -> torch.Tensor:
            return backward(batch, step_tokens)

        return where_not_finite(model, run_both_passes, repeated, own_gradients, hosts)

    def settle() -> None:
        """Waits for the device and reads what it has counted. Raises UserError where gradients end
        the run.
        """
        nonlocal uncounted
        progress.tokens, uncounted = progress.tokens + int(uncounted), 0
        found = guard.look()
        progress.skipped_steps += found.steps
        limit, scaled = run.train.max_skipped_steps, scaler is not None
        require_finite(found, limit, stop_at_first, scaled, trace, writer.last_good)

    def log(loss_sum, step_targets, norm, rate: float) -> None:
        settle()
        loss = float(accelerator.reduce(loss_sum, "sum") / step_targets)
        line = {"step": progress.step, "tokens": progress.tokens, "loss": loss, "lr": rate}
        line |= {"grad_norm": float(norm), "skipped_steps": progress.skipped_steps}
        line |= {"loss_scale": scaler.get_scale()} if scaler is not None else {}
        flops = model.flops_per_token()["useful"]
        line |= timer.window(flops, accelerator, run.train.mixed_precision)
        if metrics:
            metrics.write(line)
        console.line(line)

    def save() -> None:
        trainer = asdict(progress) | state.identity
        trainer["data_directory"] = run.data.directory
        trainer["threads"] = torch.get_num_threads()
        trainer["mixing"] = state.mixing
        trainer["scaler"] = scaler.state_dict() if scaler is not None else None
        trainer["wandb_id"] = metrics.wandb_id if metrics else None
        writer.save(state.optimizer.optimizer, trainer)

    def evaluate() -> None:
        samples, batch_size = run.train.eval_samples, run.train.batch_size
        loss, bits = validation_loss(parallel, data.validation, samples, batch_size, accelerator)
        if progress.step == run.train.steps and not math.isfinite(loss):
            # Its steps were skipped to the end: the weights are finite, and of no use.
            raise UserError(
                f"after the last step the validation loss is not finite: {loss} "
                f"({progress.skipped_steps} steps were skipped). Lower optim.lr or raise "
                "optim.warmup_steps, and give the run another name"
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
            set_learning_rate(state.optimizer.optimizer, rate)
            with timer.waiting():
                micro_batches = [to_device(batch, device) for batch in batches.next()]
            step_targets = step_tokens
            if not run.data.packed:  # rows are padded: count the targets of all processes
                own_targets = sum((targets != -100).sum() for _, targets in micro_batches)
                step_targets = accelerator.reduce(own_targets, "sum")

            loss_sum = torch.zeros((), device=device)
            for micro, batch in enumerate(micro_batches, 1):
                is_last = micro == len(micro_batches)
                with nullcontext() if is_last else accelerator.no_sync(parallel):
                    loss_sum += backward(batch, step_targets)
            accelerator.unscale_gradients()  # of fp16's loss scale
            norm = gradient_norm(parallel.parameters())
            clip(state.optimizer.optimizer, norm, run.train.max_grad_norm)
            guard.before_step(norm, progress.step + 1)
            writer.before_update()
            state.optimizer.step()  # skipped on the device if the gradient is not finite
            state.optimizer.zero_grad(set_to_none=True)

            progress.step += 1
            progress.samples += share.step_samples
            uncounted += step_targets
            timer.step(step_targets)
            profiler.after_step(progress.step)
            writer.check()
            console.step(progress.step)

            done = progress.step == run.train.steps
            if progress.step % run.logging.log_every == 0 or done:
                log(loss_sum, step_targets, norm, rate)
            stopping = stop.agreed()
            saving, evaluating = save_due(run, progress.step), evaluation_due(run, progress.step)
            if stopping or saving or evaluating:
                settle()  # outside of the pause: steps still queued on a GPU are training time
            # A stop during a slow save waits for that one alone, as time may be short.
            busy = stopping and not done and writer.is_busy()
            with timer.paused():
                if (stopping or saving) and not busy:
                    save()  # before the evaluation, whose failure must not cost the checkpoint
                elif done:  # also a run that saves nothing must not end well with NaN
                    writer.require_finite(state.optimizer.optimizer, progress.step)
                if evaluating:
                    evaluate()
            if stopping and not done:
                good = writer.last_good() if busy else "The same command goes on from there"
                writer.wait()
                console.say(f"stopped by a signal after step {progress.step}. {good}")
                break
        writer.close()
    finally:
        writer.abandon()  # does nothing unless an error ends the run
        batches.close()
        profiler.close()
        console.close()
        stop.close()
    if metrics:
        metrics.close()
    return model


def evaluation_due(run: RunConfig, step: int) -> bool:
    every = run.train.eval_every
    return step == run.train.steps or (every > 0 and step % every == 0)


def save_due(run: RunConfig, step: int) -> bool:
    if step == run.train.steps and run.checkpoint.save_last:
        return True
    every = run.checkpoint.save_every
    return every > 0 and step % every == 0
