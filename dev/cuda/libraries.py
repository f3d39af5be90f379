"""Prints, as shell assignments, where the libraries lie that a ladder loads: cuBLAS, and the
trainer's own kernels.

eval "$(python3 libraries.py)" in a shell, then run a ladder. What is set already is kept; what
cannot be found is left out, with a reason on stderr, and the ladder runs without it.
"""

import glob
import importlib.util
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cublas_folders() -> list[str]:
    """Where a libcublas may be: CUDA's Python wheels (torch brings one), then toolkits."""
    wheels = importlib.util.find_spec("nvidia")
    folders = (
        [f"{folder}/*/lib" for folder in (wheels.submodule_search_locations or [])]
        if wheels
        else []
    )
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return folders + [f"{home}/lib64" for home in homes if home]


def find_cublas() -> str:
    for folder in cublas_folders():
        if found := sorted(glob.glob(f"{folder}/libcublas.so*")):
            return found[-1]
    raise FileNotFoundError(
        "no libcublas in CUDA's Python wheels, $CUDA_HOME or /usr/local/cuda: no rival"
    )


def find_kernels() -> str:
    sys.path.insert(0, str(ROOT))
    import torch

    from mixer.ops import build

    return str(build.library(torch.cuda.get_device_capability()))


def main() -> None:
    for name, find in (("CUBLAS_LIBRARY", find_cublas), ("MIXER_KERNELS", find_kernels)):
        try:
            print(f"export {name}={shlex.quote(os.environ.get(name) or find())}")
        except Exception as error:  # whatever it is, the ladder can do without
            print(f"{name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
