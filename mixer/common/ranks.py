"""Which process of a launch this is, by what a launcher such as torchrun sets in the environment,
and how functions tell people what they do: line by line, to the `say` that they are given.

A pod or a job script may set such variables too, so a rank counts only where the others fit it.
"""

import os
import sys
from collections.abc import Callable

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
NAMES = (*PLACE, "MASTER_ADDR", "MASTER_PORT")

Say = Callable[[str], None]


def is_launched() -> bool:
    """Whether a launcher has started this process."""
    try:
        rank, local_rank, size = (int(os.environ[name]) for name in PLACE)
    except (KeyError, ValueError):
        return False
    return 0 <= local_rank <= rank < size and all(os.environ.get(name) for name in NAMES)


def rank() -> int:
    """0 where no launcher has started this process."""
    return int(os.environ["RANK"]) if is_launched() else 0


def say_on_stderr(line: str) -> None:
    """For commands whose stdout is their result. Of several processes the first one prints."""
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)


def oddity() -> str:
    """What is wrong with the environment where it has a rank, or several processes, without a
    launcher; "" if nothing is.
    """
    given = {name: os.environ[name] for name in NAMES if name in os.environ}
    is_first = "LOCAL_RANK" not in given and given.get("RANK", "0") == "0"
    if is_launched() or (is_first and given.get("WORLD_SIZE", "1") == "1"):
        return ""
    said = " ".join(f"{name}={value}" for name, value in given.items())
    return (
        f"the environment has {said}, as no launcher sets it; allowed: all of {', '.join(NAMES)}, "
        "with LOCAL_RANK <= RANK < WORLD_SIZE, or none; start this with torchrun or accelerate "
        f"launch, or without them: env {' '.join(f'-u {name}' for name in given)} python ..."
    )
