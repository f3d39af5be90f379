"""Messages between the processes of a run, and the end of a process that fails."""

import os
import sys
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from mixer.common.errors import UserError, end_at_interrupt

LOST_CONTACT = (
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited or there was a network error",
)
# How long a process that fails waits to hear whether another one failed first.
QUIET_SECONDS = 1.0


class Hosts:
    """Small messages between the processes. They go over gloo, so that no process waits for the
    work queued on its GPU.
    """

    def __init__(self, accelerator: Accelerator):
        self.processes, self.rank = accelerator.num_processes, accelerator.process_index
        self.group = dist.new_group(backend="gloo") if self.processes > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank; every process gets them."""
        if self.group is None:
            return [value]
        values = [None] * self.processes
        dist.all_gather_object(values, value, group=self.group)
        return values

    def of_main(self, value: Any) -> Any:
        """The value of the main process; every process gets it."""
        return self.gather(value)[0]

    def require_shared(self, what: str, seen: Any) -> None:
        """Raises UserError unless all processes see the same content in a directory that all hosts
        must share. `seen` identifies the content, `what` names the directory.
        """
        every = self.gather(seen)
        other = next((rank for rank, value in enumerate(every) if value != every[0]), None)
        if other is not None:
            raise UserError(
                f"{what} is not for process {other} what it is for process 0; allowed: one "
                "directory for all hosts, on a file system that they share; give its full path if "
                "hosts start in different directories"
            )

    def begin_any(self, flag: bool) -> "PendingFlag":
        """Starts to ask whether the flag is true on any process; `result` waits for the answer."""
        return PendingFlag(flag, self.group)


class PendingFlag:
    """A question to all processes whose answers are on their way."""

    def __init__(self, flag: bool, group):
        self.flag, self.work = torch.tensor(int(flag)), None
        if group is not None:
            self.work = dist.all_reduce(self.flag, group=group, async_op=True)

    def result(self) -> bool:
        if self.work is not None:
            self.work.wait()
        return bool(self.flag)


def leave_with_error(error: BaseException) -> None:
    """Ends this process at once and prints its error, unless another process failed first.

    When a process ends, its peers fail too because their connections break, and their errors would
    hide the cause. So every failing process draws a number from the launch's store before its
    connections close, and only number one prints its error.
    """
    if isinstance(error, KeyboardInterrupt):
        end_at_interrupt(KeyboardInterrupt, error, None)
    rank, first = dist.get_rank(), _first_to_fail()
    if first:
        told = [f"error: {error}\n"]
        text = "".join(told if isinstance(error, UserError) else traceback.format_exception(error))
        if any(sign in text for sign in LOST_CONTACT):
            text += "another process of this run ended without saying why: it was killed, "
            text += "for example by the system for lack of memory\n"
        print(f"process {rank} failed:\n{text}", end="", file=sys.stderr)
    else:
        print(f"process {rank} ends, as another process failed first", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the destructors of broken connections could wait for ever.
    os._exit(2 if isinstance(error, UserError) else 1)


def _first_to_fail() -> bool:
    try:
        return dist.distributed_c10d._get_default_store().add("mixer/failed", 1) == 1
    except Exception:  # the process that holds the store has ended, so it failed first
        time.sleep(QUIET_SECONDS)
        return False
