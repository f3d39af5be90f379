"""Several processes on a CPU, as asked for.

`accelerate launch --cpu --num_processes N` starts a single process and says nothing (accelerate
leaves several on a CPU to MPI), so a run would train on an N-th of its batch unnoticed. What was
asked for is started here, by torchrun.
"""

import os
import sys

import psutil

from mixer.common.errors import UserError
from mixer.distributed.stop import SIGNALS

OPTIONS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


def start_asked_for_processes() -> None:
    """Replaces this process by a torchrun of the same command, where its launcher was asked for
    more than one on a CPU.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true" or "RANK" in os.environ:
        return
    parent = psutil.Process().parent()  # none, where this is the first process of a container
    given = _launch_options(parent.cmdline()) if parent else {}
    if int(given.get("num_processes", 1)) > 1:
        sys.stdout.flush()
        os.environ.setdefault(
            "PET_SIGNALS_TO_HANDLE", ",".join(signal.name for signal in SIGNALS)
        )  # for torchrun to pass on
        os.execv(
            sys.executable,
            [sys.executable, "-m", "torch.distributed.run", *_torchrun_options(given), *sys.argv],
        )


def _torchrun_options(given: dict[str, str]) -> list[str]:
    """torchrun's options for accelerate's; num_processes counts those of all machines."""
    processes, machines = int(given["num_processes"]), int(given.get("num_machines", 1))
    if machines == 1:
        return ["--standalone", f"--nproc_per_node={processes}"]
    if processes % machines:
        raise UserError(
            f"--num_processes {processes} on --num_machines {machines}; allowed: a multiple of {machines}"
        )
    missing = [
        name
        for name in ("machine_rank", "main_process_ip", "main_process_port")
        if name not in given
    ]
    if missing:
        raise UserError(
            f"--num_machines {machines} needs --{' and --'.join(missing)} too; give them to accelerate launch"
        )
    place = [f"--node_rank={given['machine_rank']}", f"--master_addr={given['main_process_ip']}"]
    return [
        f"--nnodes={machines}",
        f"--nproc_per_node={processes // machines}",
        *place,
        f"--master_port={given['main_process_port']}",
    ]


def _launch_options(command: list[str]) -> dict[str, str]:
    """OPTIONS that are in an `accelerate launch` command line, before its script."""
    given: dict[str, str] = {}
    if "launch" not in command:
        return given
    for index, word in enumerate(command):
        name, _, value = word.partition("=")
        if name.endswith(".py"):
            break  # what follows belongs to the script
        name = name.removeprefix("--").replace("-", "_")
        if name in OPTIONS:
            given[name] = value or command[index + 1]
    return given
