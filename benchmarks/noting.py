"""train.py that also says which process made the data and the kernels that all of them use."""

import time
from types import ModuleType

from mixer.common.errors import run_command
from mixer.common.ranks import rank
from mixer.data import prepare
from mixer.ops import build
from mixer.train import main


def note(what: str, module: ModuleType, maker: str) -> None:
    make = getattr(module, maker)

    def noted(*arguments):
        began = time.monotonic()
        made = make(*arguments)
        print(f"rank {rank()} made {what} in {time.monotonic() - began:.1f} s", flush=True)
        return made

    setattr(module, maker, noted)


if __name__ == "__main__":
    note("data", prepare, "_make")
    note("kernels", build, "build")
    run_command(main)
