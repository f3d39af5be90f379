"""Finds nvcc, which builds the CUDA kernels, and its flags for a GPU."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mixer.common.errors import UserError

OLDEST = 70  # the kernels are written for sm_70 and newer
HOPPER_FLAG = "-DMIXER_HOPPER"  # the kernels of csrc/hopper*.cu are there


class BuildError(UserError):
    """The kernels cannot be built here; the message says what is missing and the one command that
    fixes it.
    """


@dataclass(frozen=True)
class Compiler:
    """An nvcc: its path, its version (13, 0), and the architectures it knows, e.g. (75, 80, 90)."""

    path: Path
    version: tuple[int, int]
    architectures: tuple[int, ...]


def nvcc_candidates() -> Iterator[Path]:
    """Where an nvcc may be, in the order in which we take it."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        yield Path(found)
    # A namespace package: one location for each site-packages.
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or []) if wheels else []:
        yield Path(folder) / "cu13" / "bin" / "nvcc"
        yield Path(folder) / "cuda_nvcc" / "bin" / "nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")


def find_compiler() -> Compiler:
    """The first nvcc that runs. Raises BuildError when there is none."""
    for path in nvcc_candidates():
        if os.access(path, os.X_OK):
            # nvcc looks for its headers beside the path that it is called by, be that a link. A
            # link to ccache or another wrapper stays: the name says what that is to run.
            own = path.resolve()
            return inspect_compiler(own if own.name.startswith("nvcc") else path)
    raise BuildError(
        "the CUDA kernels need nvcc, and there is none in $CUDA_HOME, $CUDA_PATH, $PATH or the "
        "nvidia-cuda-nvcc wheel. Install it with `pip install nvidia-cuda-nvcc nvidia-cuda-runtime "
        "nvidia-cuda-cccl`, or point CUDA_HOME at a CUDA toolkit."
    )


@functools.cache
def inspect_compiler(path: Path) -> Compiler:
    """Asks an nvcc for its version and architectures."""
    try:
        version = re.search(r"release (\d+)\.(\d+)", output_of([str(path), "--version"]))
        architectures = re.findall(r"compute_(\d+)\b", output_of([str(path), "--list-gpu-arch"]))
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"{path} does not run ({error}). Point CUDA_HOME at a working CUDA toolkit."
        ) from error
    if version is None or not architectures:
        raise BuildError(
            f"{path} does not answer like nvcc. Point CUDA_HOME at a working CUDA toolkit."
        )
    known = tuple(sorted(map(int, architectures)))
    return Compiler(path, (int(version[1]), int(version[2])), known)


def output_of(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def architecture_flags(compiler: Compiler, capability: tuple[int, int]) -> list[str]:
    """The flags for one GPU, -gencode last. A GPU newer than nvcc gets PTX of the newest
    architecture nvcc knows.
    """
    wanted = capability[0] * 10 + capability[1]
    if wanted < OLDEST:
        raise BuildError(
            "the CUDA kernels need compute capability 7.0 or newer; this GPU has "
            f"{dotted(capability)}. Use `model.mixing_backend=dense`."
        )
    oldest = dotted(divmod(compiler.architectures[0], 10))
    known = [architecture for architecture in compiler.architectures if architecture <= wanted]
    if not known:
        raise BuildError(
            f"nvcc {dotted(compiler.version)} ({compiler.path}) no longer compiles for compute "
            f"capability {dotted(capability)} (the oldest it knows is {oldest}). Install CUDA 12.x "
            "(12.9 is the last that knows 7.0) and point CUDA_HOME at it, e.g. `export "
            "CUDA_HOME=/usr/local/cuda-12.9`."
        )
    if known[-1] != wanted:
        return [f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}"]
    if wanted == 90 and compiler.version >= (12, 0):
        # 9.0a: Hopper's own instructions (wgmma, TMA), which plain sm_90 leaves out.
        return [HOPPER_FLAG, "-gencode=arch=compute_90a,code=sm_90a"]
    return [f"-gencode=arch=compute_{wanted},code=sm_{wanted}"]


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
