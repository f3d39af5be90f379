"""Which process of a launch this is, by VARIABLES. A launcher such as torchrun sets all of them;
pods and job scripts may set some.
"""

import os

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
VARIABLES = (*RANKS, "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether a launcher has started this process."""
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in RANKS)
    except (KeyError, ValueError):
        return False
    return 0 <= local_rank <= rank < world_size and all(os.environ.get(name) for name in VARIABLES)


def rank() -> int:
    """0 if no launcher has started this process."""
    return int(os.environ["RANK"]) if is_launched() else 0


def processes() -> int:
    """How many the launcher has started; 1 if none has."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1
