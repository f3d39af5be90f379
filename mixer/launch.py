"""Several processes on a CPU, as asked for.

`accelerate launch --cpu --num_processes N` starts a single process and says nothing (accelerate leaves several on a CPU to
MPI), so a run would train on an N-th of its batch unnoticed. What was asked for is started here, by torchrun.
"""

import os
import sys

import psutil


def start_asked_for_processes() -> None:
    """Replaces this process by a torchrun of the same command, where its launcher was asked for more than one on a CPU."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true" or "RANK" in os.environ:
        return
    count = _num_processes(psutil.Process().parent().cmdline())
    if count > 1:
        sys.stdout.flush()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        os.execv(sys.executable, torchrun + sys.argv)


def _num_processes(command: list[str]) -> int:
    """The value of --num_processes in an `accelerate launch` command line, 1 where there is none."""
    if "launch" not in command:
        return 1
    for index, word in enumerate(command):
        name, _, value = word.partition("=")
        if name.endswith(".py"):
            break  # what follows belongs to the script
        if name.replace("-", "_") == "__num_processes":
            value = value or command[index + 1]
            return int(value) if value.isdigit() else 1
    return 1
