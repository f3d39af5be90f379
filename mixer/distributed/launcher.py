"""What a launcher has started this process for. Importing this takes no time."""

import ctypes
import os
import signal
import sys

from mixer.common.errors import UserError
from mixer.common.ranks import RANKS, VARIABLES, is_launched

# Variables that accelerate and torchrun set. RANK may come from a shell that ends before the run.
ACCELERATE = "ACCELERATE_DYNAMO_BACKEND"
TORCHRUN = "TORCHELASTIC_RUN_ID"
# As accelerate reads its flags.
TRUE = ("y", "yes", "t", "true", "on", "1")
FALSE = ("n", "no", "f", "false", "off", "0")


def follow_launcher() -> None:
    """Has this process receive SIGTERM when its launcher ends, because accelerate passes no signal
    on. Raises UserError for a launch that cannot train.
    """
    if problem := _problem_of_ranks() or _problem_of_accelerate():
        raise UserError(problem)
    if ACCELERATE in os.environ or (is_launched() and TORCHRUN in os.environ):
        launcher = os.getppid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != launcher:  # it has already ended
            signal.raise_signal(signal.SIGTERM)


def _problem_of_ranks() -> str:
    """What is wrong with an environment that names a rank, but not all that a launcher sets; "" if
    nothing is.
    """
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    ranks = {name: value for name, value in variables.items() if name in RANKS}
    if is_launched() or ranks.items() <= {"RANK": "0", "WORLD_SIZE": "1"}.items():
        return ""
    assignments = " ".join(f"{name}={value}" for name, value in variables.items())
    removals = " ".join(f"-u {name}" for name in variables)
    return (
        f"the environment has {assignments}, but no launcher set it; allowed: all of "
        f"{', '.join(VARIABLES)}, with LOCAL_RANK <= RANK < WORLD_SIZE, or none; start this with "
        f"torchrun or accelerate launch, or unset them: env {removals} python ..."
    )


def _problem_of_accelerate() -> str:
    """What accelerate's variables ask for and this trainer cannot do; "" if it can."""
    flags = set()  # that are on
    for name in os.environ:
        if name.startswith(("ACCELERATE_USE_", "FSDP_OFFLOAD_")):
            value = os.environ[name].lower()
            if value not in TRUE + FALSE:
                return f"{name} = {os.environ[name]!r}; allowed: true, false"
            if value in TRUE:
                flags.add(name)
    engines = ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
    refused = [engine.lower() for engine in engines if f"ACCELERATE_USE_{engine}" in flags]
    if "ACCELERATE_USE_FSDP" in flags:
        version = os.environ.get("FSDP_VERSION", "1")
        if version != "2":
            refused.append(f"fsdp_version: {version}")
        if "FSDP_OFFLOAD_PARAMS" in flags:  # the optimizer's steps could not be skipped there
            refused.append("fsdp_offload_params: true")
    if refused:
        return (
            f"accelerate was asked for {refused[0]}; allowed: DDP, or version 2 of FSDP without "
            "offloading, as in configs/accelerate/1x8_fsdp.yaml"
        )
    # On a CPU accelerate starts one process, which would train on a part of the batch. Where it
    # does not set MASTER_ADDR, a pod may, which sets WORLD_SIZE too.
    several = "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    if ACCELERATE in os.environ and several and not is_launched():
        return (
            "accelerate launch was asked for several processes but started one; allowed: "
            "--multi_gpu; on a CPU start them with: torchrun --nproc_per_node=2 "
            f"{os.path.basename(sys.argv[0])} ..."
        )
    return ""
