"""What launchers leave to be done: several processes on a CPU, and their end with the launcher.

accelerate leaves several processes on a CPU to MPI: it starts a single one and says nothing. The
run would then train on 1/N of its batch. So this single one starts the N processes.
"""

import ctypes
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import torch
from accelerate.commands import launch
from accelerate.utils.other import get_free_port

from mixer.common.errors import UserError
from mixer.common.ranks import is_launched, oddity
from mixer.distributed.stop import stop_signals

# torchrun sets it. Who sets RANK by hand may do so in a shell that ends before the run does.
LAUNCH_ID = "TORCHELASTIC_RUN_ID"
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
OTHERS_SECONDS = 30.0  # until processes that outlive a failed one are killed


def start_asked_for_processes() -> None:
    """Runs this command as N processes and exits, if accelerate was asked for N > 1 and has started
    one. Ends a process of accelerate or torchrun, as SIGTERM does, when the launcher ends.

    Raises UserError where there cannot be N, and in an environment that no launcher has made.
    """
    if problem := oddity():
        raise UserError(problem)
    parent = psutil.Process().parent()  # None for the first process of a container
    # accelerate launch, accelerate-launch, -m accelerate.commands.launch
    of_accelerate = re.search(
        r"accelerate[^\0]*[\0./-]launch\0(.*)", "\0".join(parent.cmdline() if parent else ""), re.S
    )
    if of_accelerate or (is_launched() and LAUNCH_ID in os.environ):
        _end_with_launcher(os.getppid())
    if is_launched():
        return
    several = {"ACCELERATE_DYNAMO_BACKEND", "MASTER_ADDR"} <= os.environ.keys()
    if of_accelerate:
        logging.getLogger(launch.__name__).setLevel(logging.ERROR)  # accelerate has said it
        options = launch.launch_command_parser().parse_args(of_accelerate[1].split("\0"))
        asked, _, _ = launch._validate_launch_command(options)  # reads its configuration file
        several = (asked.num_processes or 1) > 1
        on_cpu = os.environ["ACCELERATE_USE_CPU"].lower() == "true" or not torch.cuda.is_available()
        if several and on_cpu and (asked.num_machines or 1) == 1:
            sys.exit(_run(asked.num_processes))
    if several:
        raise UserError(
            "accelerate launch was asked for several processes, and has started one; allowed: "
            "--multi_gpu, or --cpu on one machine without mpirun; otherwise start torchrun on each "
            "machine: torchrun --nnodes=MACHINES --nproc_per_node=PROCESSES --node_rank=RANK "
            "--master_addr=HOST --master_port=PORT train.py ..."
        )


def _end_with_launcher(pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != pid:  # it has ended meanwhile
        signal.raise_signal(signal.SIGTERM)


def _run(processes: int) -> int:
    """Runs this command as so many processes, and passes signals on to them. Returns the largest
    exit status, a signal's as a shell gives it.
    """
    started_as = sys.modules["__main__"].__spec__  # None for a script, as opposed to -m MODULE
    program = ["-m", started_as.name] if started_as else [sys.argv[0]]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    environment |= {"WORLD_SIZE": str(processes), LAUNCH_ID: str(os.getpid())}
    ranks: list[subprocess.Popen] = []
    for number in stop_signals():
        signal.signal(number, lambda number, _: [rank.send_signal(number) for rank in ranks])
    for rank in map(str, range(processes)):
        command = [sys.executable, *program, *sys.argv[1:]]
        ranks.append(
            subprocess.Popen(command, env=environment | {"RANK": rank, "LOCAL_RANK": rank})
        )
    deadline = math.inf
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
        if any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
    return max(128 - rank.returncode if rank.returncode < 0 else rank.returncode for rank in ranks)
