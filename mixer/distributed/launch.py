"""Several processes on the CPU of one machine, for `accelerate launch --cpu --num_processes N`.

accelerate starts a single process there and says nothing, because it leaves several processes on
a CPU to MPI. The run would then train on 1/N of its batch. So torchrun starts the N processes here.
"""

import os
import sys

import psutil
from accelerate.commands.launch import launch_command_parser

from mixer.common.errors import UserError
from mixer.distributed.stop import stop_signals


def start_asked_for_processes() -> None:
    """Replaces this process by a torchrun of the same command, if accelerate was asked for N > 1.

    Raises UserError if several machines were asked for.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true" or "RANK" in os.environ:
        return
    parent = psutil.Process().parent()  # None for the first process of a container
    words = parent.cmdline() if parent else []
    if "launch" not in words:
        return
    asked, _ = launch_command_parser().parse_known_args(words[words.index("launch") + 1 :])
    if (asked.num_machines or 1) > 1:
        raise UserError(
            f"--num_machines {asked.num_machines} on CPUs; accelerate launch --cpu allows 1; "
            "start torchrun on each machine: torchrun --nnodes=MACHINES --nproc_per_node=PROCESSES "
            "--node_rank=RANK --master_addr=HOST --master_port=PORT train.py ..."
        )
    if (asked.num_processes or 1) > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher.append(f"--nproc_per_node={asked.num_processes}")
        started_as = sys.modules["__main__"].__spec__  # None for a script, as opposed to -m MODULE
        program = ["-m", started_as.name] if started_as else [sys.argv[0]]
        passed_on = ",".join(signal.name for signal in stop_signals())
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", passed_on)  # read by torchrun
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *launcher, *program, *sys.argv[1:]])
