"""Training, from a configuration to the last checkpoint: one visible loop."""

import fcntl
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from mixer import checkpoint
from mixer.config import RunConfig, save_config
from mixer.configuration import MaskedMixerConfig
from mixer.data import SampleOrder, TokenFile, load_tokenizer, prepare
from mixer.errors import UserError
from mixer.hardware import check_precision, peak_tflops
from mixer.metrics import Metrics
from mixer.modeling import MaskedMixerForCausalLM
from mixer.optim import build_optimizer, learning_rate, set_learning_rate


@dataclass
class Progress:
    """Where a run stands; saved in every checkpoint."""

    step: int = 0
    samples: int = 0  # position in the data: samples consumed by all processes
    tokens: int = 0  # target tokens trained on
    skipped_steps: int = 0  # fp16 steps whose gradients overflowed


def train(run: RunConfig) -> None:
    """Trains `run` on all processes of the launch, going on from its newest complete checkpoint."""
    transformers.utils.logging.disable_progress_bar()
    accelerator = Accelerator(mixed_precision=run.train.mixed_precision)
    try:
        with run_locked(run.directory) if accelerator.is_main_process else nullcontext():
            _train(run, accelerator)
    finally:
        accelerator.end_training()


def _train(run: RunConfig, accelerator: Accelerator) -> None:
    check_precision(accelerator.device, run.train.mixed_precision)
    torch.backends.cuda.matmul.allow_tf32 = run.train.tf32
    stop = _stop_on_signal()
    main = accelerator.is_main_process

    # Data. Every process asks; one per node prepares while the others wait at the file lock.
    manifest = prepare(run.data, progress=accelerator.print)
    context = run.model.max_position_embeddings
    training = TokenFile(run.data.directory, "train", context)
    validation = TokenFile(run.data.directory, "validation", context)
    tokenizer = load_tokenizer(run.data.directory)
    order = SampleOrder(len(training), run.seed)

    # Model and optimizer, new or from a checkpoint.
    if main:
        checkpoint.remove_partial(run.directory)
    accelerator.wait_for_everyone()
    resumed = checkpoint.find_resume(run.directory, run.checkpoint.resume, accelerator.print)
    accelerator.wait_for_everyone()  # every process has looked before one of them writes
    set_seed(run.seed)
    config = model_config(run, manifest.vocab_size, manifest.eos_token_id)
    state = checkpoint.load_trainer(resumed, manifest.fingerprint) if resumed else {}
    model = checkpoint.load_model(resumed, config) if resumed else MaskedMixerForCausalLM(config)
    model.to(accelerator.device)
    optimizer = build_optimizer(model, run.optim)
    parallel, optimizer = accelerator.prepare(model, optimizer)  # DDP and autocast around the model
    progress = Progress(**{name: state[name] for name in asdict(Progress())}) if resumed else Progress()
    if resumed:
        checkpoint.load_optimizer_and_random_state(resumed, accelerator, optimizer)
        if accelerator.scaler is not None and state["scaler"]:
            accelerator.scaler.load_state_dict(state["scaler"])
    metrics = None
    if main:
        save_config(run, run.directory / "config.yaml")
        metrics = Metrics(run.directory, run.logging, asdict(run), state.get("wandb_id"))
        metrics.rewind(progress.step, again={"validation_loss"} if evaluation_due(run, progress.step) else set())
    accelerator.print(_banner(run, accelerator, model, training, resumed))

    def save() -> None:
        extra = {
            "data_directory": run.data.directory,
            "data_fingerprint": manifest.fingerprint,
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
            "wandb_id": metrics.wandb_id if metrics else None,
        }
        trainer = asdict(progress) | extra
        path = checkpoint.save(run.directory, accelerator, model, tokenizer, optimizer, trainer, run.checkpoint.keep)
        accelerator.print(f"saved {path}")

    def evaluate() -> None:
        loss, bits = validation_loss(parallel, validation, run, accelerator)
        if metrics:
            line = {"step": progress.step, "tokens": progress.tokens}
            metrics.write(line | {"validation_loss": loss, "validation_bits_per_byte": bits})
        accelerator.print(f"step {progress.step}: validation loss {loss:.4f}, {bits:.4f} bits per byte")

    # A run killed between saving and evaluation owes the evaluation; made again, it gives the same numbers.
    if not resumed or evaluation_due(run, progress.step):
        evaluate()
    micro_samples = run.train.batch_size * accelerator.num_processes
    timer = Timer()
    while progress.step < run.train.steps:
        rate = learning_rate(run.optim, progress.step, run.train.steps)
        set_learning_rate(optimizer, rate)

        # The next samples in order, dealt to micro-batches, then processes: the order is the same for any number of both.
        batches = []
        for micro in range(run.train.gradient_accumulation_steps):
            position = progress.samples + micro * micro_samples + accelerator.process_index * run.train.batch_size
            with timer.waiting():
                batch = training.batch(order.indices(position, run.train.batch_size))
            batches.append(to_device(batch, accelerator.device))
        all_targets = accelerator.reduce(sum((targets != -100).sum() for _, targets in batches), "sum")

        loss_sum = torch.zeros((), device=accelerator.device)
        for micro, (inputs, targets) in enumerate(batches):
            last = micro == len(batches) - 1
            with nullcontext() if last else accelerator.no_sync(parallel):
                nats = token_nats(parallel(inputs).logits, targets).sum()
                # DDP takes the mean over processes; times their number it is the mean over all target tokens.
                accelerator.backward(nats * (accelerator.num_processes / all_targets))
            loss_sum += nats.detach()
        gradient_norm = accelerator.clip_grad_norm_(parallel.parameters(), run.train.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        progress.step += 1
        progress.samples += micro_samples * len(batches)
        progress.tokens += int(all_targets) if not run.data.packed else micro_samples * len(batches) * context
        progress.skipped_steps += int(accelerator.optimizer_step_was_skipped)
        timer.step(micro_samples * len(batches) * context)

        done = progress.step == run.train.steps
        if progress.step % run.logging.log_every == 0 or done:
            loss = float(accelerator.reduce(loss_sum, "sum") / all_targets)
            line = {"step": progress.step, "tokens": progress.tokens, "loss": loss, "lr": rate}
            line["grad_norm"] = float(gradient_norm)
            if accelerator.scaler is not None:
                line |= {"loss_scale": accelerator.scaler.get_scale(), "skipped_steps": progress.skipped_steps}
            line |= timer.window(model.flops_per_token()["useful"], accelerator, run.train.mixed_precision)
            if metrics:
                metrics.write(line)
            accelerator.print(
                f"step {progress.step}/{run.train.steps}: loss {loss:.4f}, lr {rate:.2e}, grad norm {line['grad_norm']:.3f}, "
                f"{line['tokens_per_second']:,.0f} tokens/s"
            )
        stopping = _agreed(stop, progress.step, run.logging.log_every, accelerator)
        with timer.paused():  # saving and evaluation are not training time
            due = run.checkpoint.save_every and progress.step % run.checkpoint.save_every == 0
            if due or done or stopping:
                save()  # first: an evaluation that fails must not cost the checkpoint
            if evaluation_due(run, progress.step):
                evaluate()
        if stopping:
            accelerator.print(f"stopped by a signal after step {progress.step}; the same command goes on from there")
            break
    if metrics:
        metrics.close()


@contextmanager
def run_locked(directory: Path) -> Iterator[None]:
    """Makes and holds a run's directory; the lock ends with this process, however it ends.

    Raises UserError where another process trains the run, such as a worker that has outlived its launcher.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory} is being trained by another process (pgrep -f train.py shows it); wait for it, end it, "
                "or choose another name"
            ) from None
        yield


def model_config(run: RunConfig, vocab_size: int, eos_token_id: int | None) -> MaskedMixerConfig:
    """The model of a run, for a tokenizer's vocabulary."""
    return MaskedMixerConfig(vocab_size=vocab_size, eos_token_id=eos_token_id, **asdict(run.model))


def evaluation_due(run: RunConfig, step: int) -> bool:
    every = run.train.eval_every
    return step == run.train.steps or (every > 0 and step % every == 0)


def to_device(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pinned, so that the copy to a GPU does not wait for the work that is queued there."""
    if device.type != "cuda":
        return batch
    return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target in nats, fp32, 0 where the target is -100: (batch, tokens, vocab), (batch, tokens) -> (n,)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")


@torch.no_grad()
def validation_loss(parallel, validation: TokenFile, run: RunConfig, accelerator: Accelerator) -> tuple[float, float]:
    """(mean nats per target token, bits per byte) over train.eval_samples samples, shared out among the processes."""
    samples = min(len(validation), run.train.eval_samples or len(validation))
    own = range(accelerator.process_index, samples, accelerator.num_processes)
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # nats, targets
    parallel.eval()
    for start in range(0, len(own), run.train.batch_size):
        inputs, targets = to_device(validation.batch(own[start : start + run.train.batch_size]), accelerator.device)
        # Not through DDP: processes may have unequal numbers of batches, and nothing is to be synchronised.
        nats = token_nats(accelerator.unwrap_model(parallel)(inputs).logits, targets)
        totals += torch.stack([nats.sum(dtype=torch.float64), (targets != -100).sum()])
    parallel.train()
    nats, count = accelerator.reduce(totals, "sum").tolist()
    split = validation.manifest.splits["validation"]
    scored_bytes = split.bytes * count / split.tokens  # the share of the split that was scored
    return nats / count, nats / math.log(2) / scored_bytes


class Timer:
    """Wall time between two lines of metrics, without saving and evaluation."""

    def __init__(self):
        self.tokens = 0
        self.waited = 0.0
        self.started = time.perf_counter()

    def waiting(self):
        return _Span(lambda seconds: setattr(self, "waited", self.waited + seconds))

    def paused(self):
        return _Span(lambda seconds: setattr(self, "started", self.started + seconds))

    def step(self, tokens: int) -> None:
        self.tokens += tokens

    def window(self, flops_per_token: float, accelerator: Accelerator, precision: str) -> dict[str, float]:
        """Throughput since the last call, of all processes together; the shares are of one device's peak."""
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.started
        speed = self.tokens / seconds
        line = {"seconds": seconds, "tokens_per_second": speed, "data_wait_share": self.waited / seconds}
        line["useful_tflops"] = speed * flops_per_token / 1e12
        peak = peak_tflops(accelerator.device, precision)
        if peak:
            line["peak_share"] = line["useful_tflops"] / accelerator.num_processes / peak
        if accelerator.device.type == "cuda":
            line["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
        self.__init__()
        return line


class _Span:
    def __init__(self, report):
        self.report = report

    def __enter__(self):
        self.began = time.perf_counter()

    def __exit__(self, *_):
        self.report(time.perf_counter() - self.began)


def _stop_on_signal() -> list[int]:
    """A list that receives the number of the first SIGTERM or SIGINT; the second one ends the process at once."""
    received: list[int] = []

    def note(number, frame):
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return received


def _agreed(stop: list[int], step: int, log_every: int, accelerator: Accelerator) -> bool:
    """Whether any process was told to stop. Several processes ask each other at logging steps, where they meet anyway."""
    if accelerator.num_processes == 1:
        return bool(stop)
    if step % log_every:
        return False
    flag = torch.tensor(float(bool(stop)), device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum") > 0)


def _banner(run: RunConfig, accelerator: Accelerator, model, training: TokenFile, resumed) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    peak = "" if peak_tflops(device, run.train.mixed_precision) else "; its peak is not known, so no share of it is reported"
    batch = run.train.batch_size * run.train.gradient_accumulation_steps * accelerator.num_processes
    return (
        f"{run.directory}: {parameters / 1e6:.1f}M parameters, token mixing {run.model.mixing_backend}, "
        f"{accelerator.num_processes} process(es) on {name}{peak}\n"
        f"{len(training):,} samples of {run.model.max_position_embeddings} tokens, {batch} a step; "
        f"{'resuming ' + str(resumed) if resumed else 'a fresh start'}"
    )
