"""What launchers leave to be done: a run ends with its launcher, and one that started too few
processes is found out.
"""

import ctypes
import os
import signal
import sys

from mixer.common.errors import UserError
from mixer.common.ranks import is_launched, oddity

# Variables that accelerate and torchrun set. RANK may come from a shell that ends before the run.
ACCELERATE, TORCHRUN = "ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"
# Engines of accelerate that shard a model in ways of their own, as its variables name them.
OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def follow_launcher() -> None:
    """Has this process end as by SIGTERM when the launcher ends that started it: accelerate passes
    no signal on.

    Raises UserError in an environment that no launcher has made. Also where accelerate was asked
    for several processes and has started one, as it does on a CPU, which would train on a part of
    the batch.
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
        _end_with(os.getppid())


def _end_with(pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != pid:  # it has ended meanwhile
        signal.raise_signal(signal.SIGTERM)
