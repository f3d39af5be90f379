"""Finds nvcc, which builds the CUDA kernels, and its flags for a GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mixer.common.errors import UserError

HOPPER_FLAG = "-DMIXER_HOPPER"  # the kernels of csrc/hopper*.cu are there


@dataclass(frozen=True)
class Compiler:
    """An nvcc: its path, its version (13, 0), and the architectures it knows, e.g. [75, 80, 90]."""

    path: Path
    version: tuple[int, int]
    architectures: list[int]


def nvcc_candidates() -> Iterator[Path]:
    """Where an nvcc may be, in the order in which we take it."""
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        yield Path(found)
    # A namespace package: one location for each site-packages.
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or []) if wheels else []:
        yield Path(folder) / "cu13" / "bin" / "nvcc"
        yield Path(folder) / "cuda_nvcc" / "bin" / "nvcc"  # of CUDA 12
    yield Path("/usr/local/cuda/bin/nvcc")


def find_compiler() -> Compiler:
    """The first nvcc that there is. Raises UserError where there is none, or it does not work."""
    path = next((path for path in nvcc_candidates() if os.access(path, os.X_OK)), None)
    if path is None:
        raise UserError(
            "the CUDA kernels need nvcc, and there is none in $CUDA_HOME, $PATH or the "
            "nvidia-cuda-nvcc wheel. Install it with `pip install nvidia-cuda-nvcc "
            "nvidia-cuda-runtime nvidia-cuda-cccl`, or point CUDA_HOME at a CUDA toolkit."
        )
    # nvcc looks for its headers beside the path that it is called by, even if that is a link. A
    # link to ccache must stay: its name says what ccache is to run.
    if path.resolve().name.startswith("nvcc"):
        path = path.resolve()
    try:
        version = re.search(r"release (\d+)\.(\d+)", output_of(path, "--version"))
        architectures = re.findall(r"compute_(\d+)\b", output_of(path, "--list-gpu-arch"))
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"{path} is broken or too old ({error}). Point CUDA_HOME at a CUDA toolkit."
        ) from error
    return Compiler(path, (int(version[1]), int(version[2])), sorted(map(int, architectures)))


def output_of(*command: Path | str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def architecture_flags(compiler: Compiler, capability: tuple[int, int]) -> list[str]:
    """The flags for one GPU, -gencode last. A GPU newer than nvcc gets PTX of the newest
    architecture nvcc knows.
    """
    wanted = capability[0] * 10 + capability[1]
    if wanted < 70:
        raise UserError(
            "the CUDA kernels need compute capability 7.0 or newer; this GPU has "
            f"{dotted(capability)}. Use `model.mixing_backend=dense`."
        )
    known = [architecture for architecture in compiler.architectures if architecture <= wanted]
    if not known:
        raise UserError(
            f"nvcc {dotted(compiler.version)} ({compiler.path}) no longer compiles for compute "
            f"capability {dotted(capability)}. Install CUDA 12.x (12.9 is the last that knows 7.0) "
            "and point CUDA_HOME at it, e.g. `export CUDA_HOME=/usr/local/cuda-12.9`."
        )
    if known[-1] != wanted:
        return [f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}"]
    if wanted == 90 and compiler.version >= (12, 0):
        # 9.0a: Hopper's own instructions (wgmma, TMA), which plain sm_90 leaves out.
        return [HOPPER_FLAG, "-gencode=arch=compute_90a,code=sm_90a"]
    return [f"-gencode=arch=compute_{wanted},code=sm_{wanted}"]


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
