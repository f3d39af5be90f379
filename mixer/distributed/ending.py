"""How the processes of a run end: with their launcher, by a signal to any of them, or because one
of them failed.
"""

import ctypes
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist

from mixer.common.errors import UserError, end_at_interrupt, first_line, is_launched, oddity
from mixer.distributed.world import World

# Variables that accelerate and torchrun set. RANK may come from a shell that ends before the run.
ACCELERATE, TORCHRUN = "ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"
# Engines of accelerate that shard a model in ways of their own, as its variables name them.
OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A launcher passes a signal on to processes that may have received it themselves. Within this time
# it counts as the same signal.
SAME_SIGNAL_SECONDS = 1.0
LOST_CONTACT = (
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited or there was a network error",
)
# How long a process that fails waits to hear whether another one failed first.
QUIET_SECONDS = 1.0


def follow_launcher() -> None:
    """Makes this process end as if by SIGTERM when its launcher ends: accelerate passes no signal
    on.

    Raises UserError for an environment that no launcher made, and where accelerate was asked for
    several processes but started one, as it does on a CPU: that would train on a part of the batch.
    """
    if problem := oddity():
        raise UserError(problem)
    for engine in OTHER_ENGINES:
        if os.environ.get(f"ACCELERATE_USE_{engine}", "").lower() == "true":
            raise UserError(
                f"accelerate was asked for {engine.lower()}; allowed: DDP or FSDP, such as "
                "accelerate launch --config_file configs/accelerate/1x8_fsdp.yaml train.py ..."
            )
    launched, by_accelerate = is_launched(), ACCELERATE in os.environ
    # Where accelerate does not set MASTER_ADDR, a pod may, which sets WORLD_SIZE too.
    several = "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    if by_accelerate and several and not launched:
        raise UserError(
            "accelerate launch was asked for several processes, and has started one; allowed: "
            "--multi_gpu; on a CPU: torchrun --nproc_per_node=PROCESSES train.py ... (on several "
            "machines also --nnodes, --node_rank, --master_addr and --master_port)"
        )
    if by_accelerate or (launched and TORCHRUN in os.environ):
        launcher = os.getppid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it has ended meanwhile
            signal.raise_signal(signal.SIGTERM)


class Stop:
    """A signal to any process: all of them save and end after the same step.

    Each step calls `ask`, which begins to ask all processes whether they received a signal, and
    then `agreed`, which returns the answer. The step is computed in between, so asking costs no
    time.

    The first signal is remembered. The same signal again ends the process at once; a different one
    does not, because a launcher that ends at Ctrl-C also sends SIGTERM. SIGHUP does nothing under
    nohup.
    """

    def __init__(self, world: World):
        self.group, self.number, self.since = world.group, 0, 0.0
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [number for number in SIGNALS if not (ignored and number is signal.SIGHUP)]
        self.before = {number: signal.signal(number, self._note) for number in numbers}

    def ask(self) -> None:
        if self.group is not None:
            self.signals = torch.tensor(int(self.number != 0))
            self.asked = dist.all_reduce(self.signals, group=self.group, async_op=True)

    def agreed(self) -> bool:
        if self.group is None:
            return self.number != 0
        self.asked.wait()
        return bool(self.signals)

    def close(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number, frame) -> None:
        now = time.monotonic()
        if self.number == number and now - self.since > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.number:
            self.number, self.since = number, now


def leave_with_error(error: BaseException) -> None:
    """Ends this process at once and prints its error, unless another process failed first.

    When a process ends, its peers fail too because their connections break, and their errors would
    hide the cause. So every failing process draws a number from the launch's store before its
    connections close, and only number one prints its error.
    """
    if isinstance(error, KeyboardInterrupt):
        end_at_interrupt(KeyboardInterrupt, error, None)
    is_user_error, rank = isinstance(error, UserError), dist.get_rank()
    trace = [f"error: {error}\n"] if is_user_error else traceback.format_exception(error)
    if not _is_first_to_fail():
        said = f"process {rank} ends, as another process failed first\n"
    elif any(sign in line for line in trace for sign in LOST_CONTACT):
        said = (
            f"process {rank} ends, as another process of this run ended without saying why: it was "
            f"killed, for example by the system for lack of memory ({first_line(error)})\n"
        )
    else:
        said = f"process {rank} failed:\n{''.join(trace)}"
    print(said, end="", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the destructors of broken connections could wait for ever.
    os._exit(2 if is_user_error else 1)


def _is_first_to_fail() -> bool:
    try:
        return dist.distributed_c10d._get_default_store().add("mixer/failed", 1) == 1
    except Exception:  # the process that holds the store has ended, so it failed first
        time.sleep(QUIET_SECONDS)
        return False
