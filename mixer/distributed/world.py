"""The processes of a run: messages between them, and how all of them end."""

import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import Tensor

from mixer.common.errors import UserError, end_at_interrupt, first_line
from mixer.common.hardware import sees_gpu
from mixer.common.ranks import VARIABLES

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A launcher may pass on a signal that its processes have received themselves. Within this time it
# counts as the same signal.
SAME_SIGNAL_SECONDS = 1.0
# The groups of processes, which are never destroyed. Python holds its lock while it destroys an
# object, and a group of gloo's waits for its threads then: one that has just ended an operation may
# itself wait for that lock, to let go of a tensor.
LASTING_GROUPS: list[Any] = []
Group = dist.ProcessGroup | None  # of the processes that train one model; None for one process
STOPPING = b"stopping after this step; the same signal again stops at once\n"


class Process:
    """One process of a launch.

    Attributes:
        device: where it computes.
        rank, size: which of how many processes it is.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1):
        self.device = device
        self.rank = rank
        self.size = size

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, computed on their devices."""
        total = tensor.clone(memory_format=torch.contiguous_format)  # others are summed wrongly
        if self.size > 1:
            dist.all_reduce(total)
        return total


class World(Process):
    """The processes of a run, as seen by one of them. Rank 0 prints, and writes the run's files.

    Attributes:
        accelerator: accelerate's engine, which wraps the model in DDP or FSDP.
        is_sharded: whether FSDP shards the model.
    """

    def __init__(self, accelerator: Accelerator):
        super().__init__(accelerator.device, accelerator.process_index, accelerator.num_processes)
        self.accelerator = accelerator
        self.is_main = self.rank == 0
        self.is_sharded = accelerator.distributed_type == DistributedType.FSDP
        # Messages go over gloo, so that no process waits for the work queued on its GPU.
        self.group = dist.new_group(backend="gloo") if self.size > 1 else None
        if self.group is not None:
            LASTING_GROUPS.extend([dist.group.WORLD, self.group])

    def say(self, line: str) -> None:
        """Prints a line, on the main process alone."""
        if self.is_main:
            print(line, flush=True)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank; every process gets them."""
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def of_main(self, value: Any) -> Any:
        """The value of the main process, on every process."""
        return self.gather(value)[0]

    def require_shared(self, name: str, content: Any) -> None:
        """Raises UserError unless all hosts share a directory. `content` identifies what this
        process sees there, `name` is what the directory is called.
        """
        contents = self.gather(content)
        for rank, rank_content in enumerate(contents):
            if rank_content != contents[0]:
                raise UserError(
                    f"{name} differs between process {rank} and process 0; allowed: one directory "
                    "that all hosts share, with its full path if hosts start in different "
                    "directories"
                )


def build_accelerator(precision: str) -> Accelerator:
    """accelerate as its launcher set it up: one process, DDP or FSDP, on one host or several.

    precision: "no" (fp32), "fp16" or "bf16". The configuration decides precision, accumulation and
    compilation; the launcher's settings for them are ignored. Raises UserError for a device that is
    not there, and whatever else accelerate's variables ask for in vain.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run of this process
    try:
        accelerator = Accelerator(
            # Else accelerate takes torchrun's processes on a CPU for separate runs, and trains on a
            # Mac's GPU, which has no fp64.
            cpu=not sees_gpu(),
            mixed_precision=precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            dynamo_backend="no",
            # Gradients stay in the buckets in which DDP sums them: no step copies them back.
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
        torch.ones(1, device=accelerator.device).item()
    except Exception as error:  # each library raises its own kinds
        # On a CPU it also follows what MPI sets.
        prefixes = ("ACCELERATE_", "FSDP_", "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
        names = [name for name in sorted(os.environ) if name.startswith(prefixes)]
        names += [name for name in VARIABLES if name in os.environ]
        variables = ", ".join(f"{name}={os.environ[name]}" for name in names) or "none"
        refusal = UserError(
            f"accelerate cannot start ({first_line(error):.200}). Its variables here: {variables}; "
            "correct those that ask for what this machine lacks, or unset them"
        )
        if dist.is_initialized():
            leave_with_error(refusal)
        raise refusal from error
    if accelerator.distributed_type == DistributedType.FSDP and precision != "no":
        plugin = accelerator.state.fsdp_plugin
        assert plugin is not None and plugin.mixed_precision_policy is not None
        # Gradients are summed in fp32, as in DDP; accelerate would sum them in the compute type.
        plugin.mixed_precision_policy = dataclasses.replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    return accelerator


class Stop:
    """A signal to any process: all of them save and end after the same step.

    Each step begins to `ask` all processes whether they received a signal. It is computed before
    they have `agreed`, so that asking costs no time.

    The same signal again ends the process at once; a different one does not, because a launcher
    that ends at Ctrl-C also sends SIGTERM. SIGHUP does nothing under nohup.
    """

    def __init__(self, world: World):
        self.group = world.group
        self.is_main = world.is_main
        self.number = 0  # of the first signal
        self.received_at = 0.0  # of time.monotonic()
        self.old_handlers = {}
        # Outside the main thread Python accepts no handlers, so signals keep their effect.
        is_main_thread = threading.current_thread() is threading.main_thread()
        for number in SIGNALS if is_main_thread else ():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self.old_handlers[number] = signal.signal(number, self._note)

    def ask(self) -> None:
        if self.group is not None:
            self.signals = torch.tensor(int(self.number != 0))
            asked = dist.all_reduce(self.signals, group=self.group, async_op=True)
            assert asked is not None  # as this process is in the group
            self.asked = asked

    def agreed(self) -> bool:
        if self.group is None:
            return self.number != 0
        self.asked.wait()
        return bool(self.signals)

    def close(self) -> None:
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)

    def _note(self, number, frame) -> None:
        seconds = time.monotonic() - self.received_at
        if self.number == number and seconds > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.number:
            self.number = number
            self.received_at = time.monotonic()
            if self.is_main:
                with suppress(OSError):  # of a reader that has gone; print() could meet itself here
                    os.write(1, STOPPING)


def leave_with_error(error: BaseException) -> None:
    """Ends this process at once and prints its error, unless another process failed first.

    When a process ends, its peers fail too because their connections break, and their errors would
    hide the cause. So every failing process draws a number from the launch's store before its
    connections close, and only number one prints its error.
    """
    if isinstance(error, KeyboardInterrupt):
        end_at_interrupt(KeyboardInterrupt, error, None)
    is_user_error = isinstance(error, UserError)
    rank = dist.get_rank()
    if _is_first_to_fail():
        trace = [f"error: {error}\n"] if is_user_error else traceback.format_exception(error)
        message = f"process {rank} failed:\n{''.join(trace)}"
    else:
        message = f"process {rank} ends because another process failed first\n"
    sys.stdout.flush()
    print(message, end="", file=sys.stderr, flush=True)
    # Not sys.exit: the destructors of broken connections could wait for ever.
    os._exit(2 if is_user_error else 1)


def _is_first_to_fail() -> bool:
    try:
        return dist.distributed_c10d._get_default_store().add("mixer/failed", 1) == 1
    except Exception:  # the process that holds the store has ended, so it failed first
        time.sleep(1)  # so that the launcher sees it end first
        return False
