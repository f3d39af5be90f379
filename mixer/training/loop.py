"""The training loop: steps, metrics, evaluations and checkpoints, to the last step or a signal."""

import gc
import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor
from torch.profiler import profile, schedule
from transformers import PreTrainedModel

from mixer.checkpoints.checkpoint import all_checkpoints
from mixer.checkpoints.settings import save_config
from mixer.checkpoints.writer import CheckpointWriter
from mixer.common.errors import NotFinite, UserError
from mixer.common.files import run_locked
from mixer.common.hardware import is_out_of_memory, out_of_memory
from mixer.common.terminal import BOLD, counted, lasting_output, styled
from mixer.data.prepare import Data
from mixer.data.samples import Batch, Batches, SampleOrder, to_device
from mixer.distributed.world import Stop, World, build_accelerator, leave_with_error
from mixer.training.config import MOST_EPOCHS, RunConfig, TrainConfig, used_configuration
from mixer.training.estimate import less_memory, needed_gb
from mixer.training.metrics import Metrics, Timer, as_text, in_json, useful_flops
from mixer.training.optim import Guard, clip, gradient_norm, learning_rate, set_learning_rate
from mixer.training.start import State, check_run, open_run_data, start_state

PROFILED = (10, 14)  # the first and the last step after the start that logging.profile traces


@lasting_output()
def train(run: RunConfig) -> PreTrainedModel:
    """Trains `run` on all processes of the launch, from its newest complete checkpoint on. Returns
    the model, which FSDP has sharded.

    Raises UserError for what cannot work here, fills memory or disk, or diverges. With several
    processes, one that fails ends its process instead.
    """
    transformers.utils.logging.disable_progress_bar()
    accelerator = build_accelerator(run.train.mixed_precision)
    with advice_on_errors(run, accelerator):
        world = World(accelerator)
        check_run(run, world)
        torch.backends.cuda.matmul.allow_tf32 = run.train.tf32
        with run_locked(run.directory) if world.is_main else nullcontext():
            data = open_run_data(run, world)
            memory_gb = needed_gb(run, data.manifest, world)
            state = start_state(run, data, world)
            # Its first collection takes long, and would hold up a signal that `Stop` is to receive.
            with manual_garbage_collection():
                if world.is_main:
                    write_config(run, state)
                model = TrainingLoop(run, data, state, world).train(memory_gb)
    accelerator.end_training()
    return model


def write_config(run: RunConfig, state: State) -> None:
    """Writes config.yaml, which stays as it is if no steps are left."""
    if state.counters.step < run.train.steps:
        path = run.directory / "config.yaml"
        save_config(used_configuration(run), path, state.record["earlier"])


class TrainingLoop:
    """The training of a run, on one of its processes. `train` does all steps that are left.

    metrics: on the main process; None on the others.
    """

    def __init__(self, run: RunConfig, data: Data, state: State, world: World):
        self.run = run
        self.objective = run.build_objective()
        self.data = data
        self.state = state
        self.world = world
        self.accelerator = world.accelerator
        self.device = world.device
        self.scaler = self.accelerator.scaler
        self.model = state.model
        self.passes = state.passes
        self.wrapped_optimizer = state.optimizer  # by accelerate
        self.optimizer = self.wrapped_optimizer.optimizer
        self.counters = state.counters
        # Step 0; on a resume the step where the run stands, whose evaluation a killed run may lack.
        self.evaluates_first = evaluation_due(run.train, self.counters.step)
        self.metrics = None
        if world.is_main:
            self.metrics = Metrics(run, self.counters.step, self.evaluates_first, state.wandb_id)
        self.guard = Guard(
            self.optimizer,
            scaled=self.scaler is not None,
            stop_at_first=run.train.non_finite == "stop",
            device=self.device,
        )
        self.writer = CheckpointWriter(
            directory=run.directory,
            keep=run.checkpoint.keep,
            keep_every=run.checkpoint.keep_every,
            world=world,
            model=self.model,
            tokenizer=data.tokenizer,
            write_beside=self.objective.write_beside,
        )
        self.batches = Batches(
            data.training,
            SampleOrder(len(data.training), run.seed),
            micro_batches=run.train.gradient_accumulation_steps,
            batch_size=run.train.batch_size,
            rank=world.rank,
            world_size=world.size,
            position=self.counters.samples,
            pin=self.device.type == "cuda",
        )
        self.step_tokens = self.batches.step_samples * self.objective.sample_tokens
        self.token_flops = useful_flops(self.model, run)
        self.counts_targets = self.objective.counts_targets(data)
        self.profiles = run.logging.profile and world.is_main
        self.stop = Stop(world)
        self.timer = Timer(self.counters.tokens)
        self.rate = 0.0  # of the last step
        self.norm = torch.zeros((), device=self.device)  # of its gradient
        self.uncounted = 0  # target tokens that are counted on the device, not yet in `counters`
        # Since the last line of metrics, of this process; the main one has those before a resume.
        # In float64 the sum is exact, so that its parts may be added in any order.
        self.nats = torch.zeros((), dtype=torch.float64, device=self.device)
        if world.is_main:
            self.nats += math.nan if self.counters.nats is None else self.counters.nats

    def train(self, memory_gb: float) -> PreTrainedModel:
        """All steps that are left, or those until a signal. Returns the model. memory_gb: from
        `needed_gb`.
        """
        counters = self.counters
        stopped = False
        try:
            self.world.say(banner(self, memory_gb))
            if self.metrics:  # a copied run may lack the link, by which the best one is spared
                self.writer.link_best(self.metrics.validation_losses)
            if self.evaluates_first:
                with self.timer.count("paused"):
                    self.evaluate()
            with profiled(self.run) if self.profiles else nullcontext() as profiler:
                while counters.step < self.run.train.steps and not stopped:
                    self.writer.raise_failure()
                    self.stop.ask()
                    self.step()
                    stopped = self.between_steps()
                    if profiler:
                        profiler.step()
            self.writer.wait()
        finally:
            self.writer.close()
            self.batches.close()
            self.stop.close()
        if self.metrics:
            self.metrics.close()
        self.world.say(closing(self, stopped))
        return self.model

    def step(self) -> None:
        """One optimizer step. Nothing in it waits for the device."""
        run = self.run
        counters = self.counters
        self.rate = learning_rate(run.optim, counters.step, run.train.steps)
        set_learning_rate(self.optimizer, self.rate)
        with self.timer.count("waiting"):
            micro_batches = [to_device(batch, self.device) for batch in self.batches.next()]
        step_targets = self.targets_in(micro_batches)
        # DDP and FSDP take the mean of the processes' gradients. The factor turns it into the
        # gradient of the mean over all target tokens of the step.
        factor = self.world.size / step_targets
        self.nats += self.passes(micro_batches, factor)
        self.accelerator.unscale_gradients()  # of fp16's loss scale
        self.norm = gradient_norm(self.optimizer)
        clip(self.optimizer, self.norm, run.train.max_grad_norm)
        self.guard.before_step(self.norm)
        self.wrapped_optimizer.step()  # skipped on the device if the gradient is not finite
        self.wrapped_optimizer.zero_grad(set_to_none=True)

        counters.step += 1
        counters.samples += self.batches.step_samples
        self.uncounted += step_targets

    def targets_in(self, micro_batches: list[Batch]) -> int | Tensor:
        """How many targets the step has on all processes, by which its loss is divided: see
        Objective.counts_targets. A number on the device where they are counted.
        """
        if not self.counts_targets:
            return self.step_tokens
        targets_of_batches = [(targets != -100).sum() for _, targets in micro_batches]
        return self.world.sum(torch.stack(targets_of_batches).sum())

    def between_steps(self) -> bool:
        """Logs, saves and evaluates where that is due. Returns whether a signal ends the run."""
        run = self.run
        step = self.counters.step
        done = step == run.train.steps
        stopping = self.stop.agreed()
        evaluating = evaluation_due(run.train, step)
        saving_last = done and run.checkpoint.save_last
        saving = stopping or saving_last or is_due(run.checkpoint.save_every, step)
        logging = done or is_due(run.logging.log_every, step)
        line = self.log() if logging else ""
        if saving or evaluating:
            self.settle()  # outside of the pause: steps still queued on a GPU are training time
        with self.timer.count("paused"):
            if saving:
                self.save()  # before anything whose failure must not cost the checkpoint
            if logging:
                self.world.say(line)
            if evaluating:
                self.evaluate()
            if saving or evaluating:
                gc.collect()  # see manual_garbage_collection
        return stopping and not done

    def settle(self) -> None:
        """Waits for the device and reads what it has counted. Raises UserError where gradients end
        the run.
        """
        self.counters.tokens += int(self.uncounted)
        self.uncounted = 0
        self.counters.skipped_steps += self.guard.look(self.counters.step)

    def log(self) -> str:
        """Writes a line of metrics, and returns it for people."""
        self.settle()
        counters = self.counters
        loss = float(self.world.sum(self.nats)) / (counters.tokens - counters.logged_tokens)
        counters.logged_tokens = counters.tokens
        self.nats.zero_()
        line = {
            "step": counters.step,
            "tokens": counters.tokens,
            "loss": loss,
            "lr": self.rate,
            "grad_norm": float(self.norm),
            "skipped_steps": counters.skipped_steps,
        }
        if self.scaler is not None:
            line["loss_scale"] = self.scaler.get_scale()
        precision = self.run.train.mixed_precision
        line |= self.timer.lap(counters.tokens, self.token_flops, self.world, precision)
        if self.metrics:
            self.metrics.write(line)
        return as_text(line, self.run.train.steps)

    def save(self) -> None:
        """Begins to write a checkpoint; see mixer/checkpoints/checkpoint.py for what it holds."""
        self.counters.nats = in_json(float(self.world.sum(self.nats)))
        trainer = asdict(self.counters) | self.state.record
        trainer["scaler"] = self.scaler.state_dict() if self.scaler is not None else None
        trainer["wandb_id"] = self.metrics.wandb_id if self.metrics else None
        self.writer.save(self.optimizer, trainer)

    def evaluate(self) -> None:
        """Writes and shows the loss on the validation split, and links the best checkpoint."""
        step = self.counters.step
        module = self.accelerator.unwrap_model(self.passes.parallel)  # DDP has nothing to do here
        scores, summary = self.objective.validate(module.eval(), self.data, self.world)
        module.train()
        loss = scores["validation_loss"]
        if step == self.run.train.steps and not math.isfinite(loss):
            # Its steps were skipped to the end: the weights are finite, and of no use.
            raise NotFinite(
                f"after the last step the validation loss is not finite: {loss} "
                f"({self.counters.skipped_steps} steps were skipped). Lower optim.lr or raise "
                "optim.warmup_steps, and give the run another name"
            )
        if self.metrics:
            self.metrics.write({"step": step, "tokens": self.counters.tokens} | scores)
            self.writer.link_best(self.metrics.validation_losses)
        line = f"step {step}: validation loss {loss:.4f}, {summary}"
        self.world.say(styled(line, BOLD, sys.stdout))


def profiled(run: RunConfig) -> profile:
    """torch's profiler, which traces PROFILED of the steps that it is told of, or as many as there
    are, and then writes the trace for chrome://tracing and Perfetto.
    """
    first, last = PROFILED
    # The step before is traced and dropped: in it, the profiler starts up.
    steps = schedule(wait=first - 2, warmup=1, active=last - first + 1, repeat=1)
    path = str(run.directory / "trace.json.gz")
    return profile(schedule=steps, on_trace_ready=lambda done: done.export_chrome_trace(path))


def banner(loop: TrainingLoop, memory_gb: float) -> str:
    """A run's first lines: what it trains on what. memory_gb: from `needed_gb`."""
    run = loop.run
    state = loop.state
    world = loop.world
    parameters = state.model.num_parameters() / 1e6
    is_mixer = run.model.architecture == "masked_mixer"
    mixing = run.model.mixing_backend if is_mixer else f"of {state.model.config.model_type}"
    processes = counted(world.size, "process", "processes")
    if world.is_sharded:
        processes += ", FSDP"
    on_gpu = world.device.type == "cuda"
    device_name = torch.cuda.get_device_name(world.device) if on_gpu else str(world.device)
    steps = run.train.steps
    samples = len(loop.data.training)
    epochs = steps * loop.batches.step_samples / samples
    begins = "a fresh start"
    if state.resumed:
        begins = f"resuming {state.resumed}"
    elif run.train.init_from:
        begins = f"a start from {run.train.init_from}"
    is_finished = state.counters.step >= steps
    if is_finished:
        begins += f", already finished ({counted(steps, 'step')}); raise train.steps to continue"
    lines = [
        f"{run.directory}: {parameters:.1f}M parameters, token mixing {mixing}, {processes} on "
        f"{device_name}",
        f"{counted(steps, 'step')} of {counted(loop.step_tokens, 'token')}, "
        f"{epochs:.2f} epochs of {counted(samples, 'sample')}",
        f"about {memory_gb:.1f} GB of memory; {begins}",
    ]
    if epochs > MOST_EPOCHS and not is_finished:
        lines.append(
            f"beyond {MOST_EPOCHS} epochs a text is worth less and less: lower train.steps, or "
            "give more text"
        )
    warmup_steps = run.optim.warmup_steps
    if warmup_steps > steps and not is_finished:
        lines.append(f"optim.warmup_steps = {warmup_steps} is cut to train.steps, {steps}")
    return "\n".join(lines)


def closing(loop: TrainingLoop, stopped: bool) -> str:
    """A run's last lines: what there is, and what can be done with it."""
    run = loop.run
    if stopped:
        step = loop.counters.step
        return f"stopped by a signal after step {step}. The same command continues from there"
    candidates = [run.directory / "best", *all_checkpoints(run.directory)[::-1]]
    checkpoints = [path for path in candidates if path.is_dir()]
    commands = [["curves", str(run.directory)]]
    if checkpoints:
        evaluate = ["eval", "--checkpoint", str(checkpoints[0]), *loop.objective.eval_arguments()]
        commands.insert(0, evaluate)
        if loop.objective.writes_text:
            commands.insert(1, ["generate", "--checkpoint", str(checkpoints[0])])
    lines = [f"{run.directory} is done. Next:"]
    lines += [f"  mixer {shlex.join(command)}" for command in commands]
    lines += ["or the same command with a larger train.steps, to go on"]
    return "\n".join(lines)


def evaluation_due(train: TrainConfig, step: int) -> bool:
    return step == train.steps or is_due(train.eval_every, step)


def is_due(every: int, step: int) -> bool:
    """Whether something is done after `step` that is done every so many steps, or never for 0."""
    return every > 0 and step % every == 0


@contextmanager
def manual_garbage_collection() -> Iterator[None]:
    """Python collects garbage inside only where the code asks for it, and leaves out the objects
    that are there now, most of which live to the end.

    On its own it would collect in the middle of a step: on one process, while all others wait for
    its gradients. In the end everything is as before, also after an error: a notebook goes on with
    the same process.
    """
    was_enabled = gc.isenabled()
    freezes = gc.get_freeze_count() == 0  # else the caller has frozen objects, which stay so
    gc.disable()
    gc.collect()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def advice_on_errors(run: RunConfig, accelerator: Accelerator) -> Iterator[None]:
    """Turns what the system refuses, memory or a file, into a UserError that says what to do. With
    several processes any error ends this one.
    """
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            error = too_large(run, accelerator.device)
        elif isinstance(error, OSError):
            error = UserError(
                f"the run in {run.directory} has ended: {error}; fix the cause and run the same "
                "command again: it continues from the last save, if any"
            )
        if accelerator.num_processes > 1:
            leave_with_error(error)
        raise error


def too_large(run: RunConfig, device: torch.device) -> UserError:
    """The error for a run that has just filled the memory, with the sizes to lower."""
    names = ["max_position_embeddings"]
    if run.model.architecture != "auto":
        names += ["hidden_size", "num_hidden_layers"]
    sizes = [f"train.batch_size = {run.train.batch_size}"]
    sizes += [f"model.{name} = {getattr(run.model, name)}" for name in names]
    remedy = less_memory(run, device)
    return out_of_memory(device, f"training {run.directory}", ", ".join(sizes), remedy)
