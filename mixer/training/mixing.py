"""What computes the token mixing of a run whose model.mixing_backend is auto.

A call of the operator has to choose by rule (mixer.ops.choice). A run knows its shapes and makes
millions of calls, so it measures once, before the first step. Its checkpoints keep the choice,
because another backend would round differently.
"""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from mixer.common.errors import UserError
from mixer.common.say import Say
from mixer.distributed.hosts import Hosts
from mixer.models.masked_mixer.mixing import KeyedConv, TriangularConv
from mixer.ops import BACKENDS, choice, cuda, timings
from mixer.ops.measure import time_backends
from mixer.ops.timings import Case
from mixer.training.compile import compiled
from mixer.training.config import RunConfig

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CANDIDATES = ("cuda", "panels", "dense")
KEYED_KERNELS = 80  # the compute capability that keyed mixing's are written for
KEYED_CANDIDATES = ("cuda", "panels")  # panels: plain PyTorch


@dataclass
class Mixing:
    """A choice, as trainer.json has it. backend "auto": each call chooses by rule."""

    backend: str
    gpu: str = ""
    dtype: str = ""
    milliseconds: dict[str, float] = field(default_factory=dict)  # of a forward and backward


@dataclass
class Workload:
    """What is chosen for: a convolution of the run's model on this GPU."""

    device: torch.device
    case: Case
    batch: int
    dtype: torch.dtype
    missing: str | None  # why our kernels cannot run on some process; None if they can
    is_compiled: bool = False  # whether the run compiles its blocks

    @property
    def gpu(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def mixing(self, backend: str, milliseconds: dict[str, float]) -> Mixing:
        return Mixing(backend, self.gpu, self.case.dtype, milliseconds)


def settle_mixing(
    model: PreTrainedModel,
    run: RunConfig,
    earlier: dict[str, Any] | None,
    accelerator: Accelerator,
    hosts: Hosts,
    say: Say,
) -> dict[str, Any] | None:
    """Sets the backend of every triangular convolution of the model, the same on all processes,
    where model.mixing_backend is auto and the device a GPU. Elsewhere nothing is done.

    It comes before the model is compiled. The main process chooses for all of them, and says so:
    what `earlier` says, the trainer.json of the checkpoint that the run goes on from; else by the
    times that `python -m mixer.ops.tune` measured for this very case; else by measuring. Keyed
    mixing has other kernels, and a choice of its own. Returns what trainer.json is to keep.
    """
    if run.model.mixing_backend != "auto" or not chooses_on(accelerator.device):
        return None
    parts = [part for part in model.modules() if isinstance(part, TriangularConv)]
    keyed = [part for part in parts if isinstance(part, KeyedConv)]
    others = [part for part in parts if not isinstance(part, KeyedConv)]
    record = settle(others, run, earlier, accelerator, hosts, say) if others else {}
    if keyed:
        record["keyed"] = settle(keyed, run, earlier, accelerator, hosts, say)
    return record or None


def settle(
    parts: list[TriangularConv],
    run: RunConfig,
    earlier: dict[str, Any] | None,
    accelerator: Accelerator,
    hosts: Hosts,
    say: Say,
) -> dict[str, Any]:
    """`settle_mixing` for parts of one kind."""
    device, dtype = accelerator.device, DTYPES[run.train.mixed_precision]
    # This builds the kernels where they are not built yet, on all hosts at once.
    reasons = hosts.gather(missing_for(parts[0], device, dtype))
    chosen = None
    if accelerator.is_main_process:
        missing = next((reason for reason in reasons if reason), None)
        workload = workload_of(parts[0], run, device, missing)
        chosen, why = choose(workload, earlier)
        what = "keyed mixing" if workload.case.key_size else "token mixing"
        takes = "goes by rule" if chosen.backend == "auto" else f"takes {chosen.backend}"
        say(f"{what}: auto {takes}, {why}")
    chosen = hosts.of_main(chosen)
    for part in parts:
        part.backend = chosen.backend
    return asdict(chosen)


def missing_for(part: TriangularConv, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our kernels cannot run on this process; None if they can."""
    if not isinstance(part, KeyedConv):
        return choice.unavailable_reason()
    sizes = (part.heads, part.key_size, part.channels // part.heads, part.context)
    return choice.keyed_unavailable_reason(device, dtype, *sizes)


def chooses_on(device: torch.device) -> bool:
    """Whether there is a choice: without a GPU there is none but panels."""
    return device.type == "cuda"


def workload_of(
    part: TriangularConv, run: RunConfig, device: torch.device, missing: str | None
) -> Workload:
    dtype = DTYPES[run.train.mixed_precision]
    tf32 = dtype == torch.float32 and cuda.allows_tf32()
    sizes = (part.context, part.channels, part.heads, part.taps)
    name = str(dtype).removeprefix("torch.")
    if isinstance(part, KeyedConv):
        case = Case(name, tf32, KEYED_KERNELS, *sizes, key_size=part.key_size)
    elif missing is None:
        case = choice.case_of(torch.cuda.current_device(), dtype, tf32, *sizes)
    else:
        case = Case(name, tf32, 0, *sizes)
    is_compiled = run.train.compile != "no"  # where keyed mixing has kernels, auto compiles
    return Workload(device, case, run.train.batch_size, dtype, missing, is_compiled)


def choose(workload: Workload, earlier: dict[str, Any] | None) -> tuple[Mixing, str]:
    """The backend for a run, and why."""
    chosen, why = (None, "") if earlier is None else kept(workload, earlier)
    is_tuned = workload.missing is None and not workload.case.key_size
    if chosen is None and is_tuned:
        row = choice.tuned(torch.cuda.current_device(), workload.case)
        if row and row.is_of(workload.case):
            chosen = workload.mixing(row.fastest, row.milliseconds)
            why = f"by the table of `python -m mixer.ops.tune`: {row.says()}"
    return measured(workload) if chosen is None else (chosen, why)


def kept(workload: Workload, earlier: dict[str, Any]) -> tuple[Mixing | None, str]:
    """The choice of the run so far, if it can be kept: on the same GPU and type it gives the same
    bits.
    """
    found = record_of(earlier, workload.case.key_size > 0)
    if found is None:
        return Mixing("auto"), "as the checkpoint is of before runs measured"
    backend, times = found.get("backend"), found.get("milliseconds")
    same = (found.get("gpu"), found.get("dtype")) == (workload.gpu, workload.case.dtype)
    if backend == "auto":
        return Mixing("auto"), "as the run did before"
    if backend not in BACKENDS or not same or (backend == "cuda" and workload.missing):
        return None, ""
    return workload.mixing(backend, times), "as the run did before"


def record_of(trainer: dict[str, Any], is_keyed: bool) -> dict[str, Any] | None:
    """What a trainer.json says of a choice: {} if there was none to make, None if it may be of
    before runs made it.
    """
    if is_keyed:
        return (trainer.get("mixing") or {}).get("keyed")
    if "mixing" not in trainer:
        return None
    return trainer["mixing"] or {}


def measured(workload: Workload) -> tuple[Mixing, str]:
    """The fastest backend by measuring, or by what an earlier run has measured for this case."""
    path = runs_path(workload)
    times = timings.recall(path, workload.case, workload.batch) if path else None
    began, failures, when = time.perf_counter(), {}, "measured by an earlier run"
    if times is None:
        times, failures = race(workload)
        when = f"measured in {time.perf_counter() - began:.1f} s"
        if path and times and not failures:
            remember(path, workload, times)
    if workload.missing:
        failures = failures | {"cuda": workload.missing}
    left_out = "".join(f"; without {name}: {reason}" for name, reason in failures.items())
    if not times:
        return Mixing("auto"), f"as nothing could be measured{left_out}"
    shape = f"{workload.case.describe(workload.batch)} on {workload.gpu}"
    why = f"the fastest for {shape}: {timings.listed(times)}, {when}{left_out}"
    return workload.mixing(min(times, key=times.get), times), why


def race(workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds of each backend that runs, and why others do not. Leaves no memory in use."""
    names = KEYED_CANDIDATES if workload.case.key_size else CANDIDATES
    candidates = [name for name in names if not (name == "cuda" and workload.missing)]
    device = workload.device
    compile = partial(compiled, graphs=False) if workload.is_compiled else None
    about = (workload.case, workload.batch, workload.dtype, device)
    found = time_backends(*about, candidates, compile)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)  # the run reports its own
    return found.milliseconds, found.failures


def runs_path(workload: Workload) -> Path | None:
    """Where runs keep what they have measured; None without a place for it."""
    if workload.missing:
        library = "no-kernels"
    elif workload.case.key_size:
        library = choice.keyed_build_name()
    else:
        library = cuda.build_name(torch.cuda.current_device())
    try:
        return timings.table_path(workload.gpu, library, "runs")
    except UserError:
        return None


def remember(path: Path, workload: Workload, milliseconds: dict[str, float]) -> None:
    """Keeps the times for other runs, so that the same run begins in the same way once more."""
    with suppress(UserError, OSError):  # without it the next run measures again
        timings.remember(path, workload.case, workload.batch, milliseconds)
