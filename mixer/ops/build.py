"""Finds the shared library of the CUDA kernels in `csrc`, or builds it, once per machine.

The library has a plain C interface and includes no torch header, so it depends on the GPU and not
on the versions of torch and Python. `make wheel` makes one for each GPU, which a wheel brings.
Elsewhere it is built in a minute or a few, also on a machine without a GPU:

    python -m mixer.ops.build --arch 9.0

It is kept in `$MIXER_CACHE` (or `${XDG_CACHE_HOME:-~/.cache}/mixer`). There and in `prebuilt`, its
folder is named after the architecture and the sources, so a stale library is never loaded. The
command always builds anew.
"""

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.files import cache_home, whole_directory
from mixer.common.progress import time_reported

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"  # of a wheel, or by `make wheel`
LIBRARY = "libmixer_kernels.so"
LOG = "build.log"
COMPILE_FLAGS = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v"]
HOPPER_FLAG = "-DMIXER_HOPPER"  # the kernels of csrc/hopper*.cu are there


def library(capability: tuple[int, int], sources: Path = SOURCES, rebuild: bool = False) -> Path:
    """The library for a GPU of this compute capability, the cache's or a prebuilt one. If there is
    none, or if `rebuild` is set, it is built into the cache first. Processes that ask at the same
    time wait for one of them. Raises UserError.
    """
    prebuilt = prebuilt_library(capability, sources)
    if prebuilt is not None and not rebuild:
        return prebuilt
    directory = cache_directory() / build_name(capability, sources)
    path = directory / LIBRARY
    if rebuild or not path.exists():
        flags = architecture_flags(capability)
        nvcc = find_nvcc()
        with whole_directory(directory) as stage:
            if rebuild or not path.exists():  # no other process has built it meanwhile
                kernels = f"CUDA kernels for compute capability {dotted(capability)}"
                message = f"mixer: building {kernels} (once, a minute or a few)"
                print(message, file=sys.stderr, flush=True)
                with time_reported(kernels):
                    build(stage, sources, nvcc, flags)
    return path


def prebuilt_library(capability: tuple[int, int], sources: Path = SOURCES) -> Path | None:
    """The library that came with the package, if it was built from these sources and the cache has
    none. Machine code for a GPU also runs on GPUs of a later minor version.
    """
    major, minor = capability
    names = [build_name((major, earlier), sources) for earlier in range(minor, -1, -1)]
    paths = [PREBUILT / name / LIBRARY for name in names]
    path = next((path for path in paths if path.exists()), None)
    return path if path is not None and not is_in_cache(names[0]) else None


def is_in_cache(name: str) -> bool:
    try:
        return (cache_directory() / name / LIBRARY).exists()
    except UserError:  # a user without a home, who needs none for a prebuilt library
        return False


def cache_directory() -> Path:
    """The cache, made (mode 0700) if it is not there. Raises UserError where others could put a
    library there, since loading it runs their code.
    """
    try:
        directory = cache_home() / "kernels"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(
                f"{directory} belongs to user {status.st_uid} and has mode "
                f"{status.st_mode & 0o777:o}; it must be yours, and writable only by you: `chmod "
                f"700 {shlex.quote(str(directory))}`"
            )
    except (OSError, RuntimeError) as error:  # a user in a container may have no home
        raise UserError(
            f"there is no cache for the kernels ({error}). You can also choose another: "
            "`export MIXER_CACHE=/a/directory/of/yours`."
        ) from error
    return directory


def build_name(capability: tuple[int, int], sources: Path) -> str:
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted(sources.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return f"sm{capability[0]}{capability[1]}-{digest.hexdigest()[:16]}"


def build(directory: Path, sources: Path, nvcc: Path, flags: list[str]) -> None:
    """Builds the library into a directory, with a log of the registers and spills of each kernel.
    Raises UserError if that fails.
    """
    directory.chmod(0o755)  # whatever the umask: others must not write there
    work = directory / "objects"
    work.mkdir()
    units = [
        unit
        for unit in sorted(sources.glob("*.cu"))
        if HOPPER_FLAG in flags or not unit.name.startswith("hopper")
    ]
    (work / "build.ninja").write_text(ninja_file(units, nvcc, flags))
    command = [sys.executable, "-m", "ninja", "--quiet", "-C", work]
    ninja = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log = ninja.stdout.decode(errors="replace")
    if ninja.returncode:
        end = "\n".join(log.splitlines()[-30:])
        raise UserError(
            f"{nvcc} could not build the CUDA kernels. It ended with:\n{end}\n"
            "Use a CUDA toolkit that supports this GPU (for compute capability 7.0 the last is "
            "12.9): `export CUDA_HOME=/path/to/cuda`."
        )
    shutil.rmtree(work)
    (directory / LOG).write_text(log)


def ninja_file(units: list[Path], nvcc: Path, flags: list[str]) -> str:
    """How to make an object of each unit, and the library of all objects, one folder above."""

    def command(*arguments: str) -> str:
        return shlex.join([str(nvcc), *arguments]).replace("$", "$$") + " $in -o $out"

    # The CUDA runtime is linked in: no libcudart has to be found later. The nvcc wheel keeps it in
    # lib, where its own profile says lib64. No kernel calls functions of another unit, so nothing
    # is left to link for the GPU.
    linked = ["-shared", "-cudart=static", "-nodlink", f"-L{nvcc.parent.parent / 'lib'}"]
    lines = [
        "rule compile",
        f"  command = {command(*COMPILE_FLAGS, *flags, '-c')}",
        "rule link",
        f"  command = {command(*linked)}",
        f"build ../{LIBRARY}: link {' '.join(f'{unit.stem}.o' for unit in units)}",
    ]
    for unit in units:
        path = re.sub("([$ :])", r"$\1", str(unit))  # what ends a name
        lines.append(f"build {unit.stem}.o: compile {path}")
    return "\n".join([*lines, ""])


def architecture_flags(capability: tuple[int, int]) -> list[str]:
    """The flags for one GPU, -gencode last. Raises UserError for a GPU that is too old."""
    if capability < (7, 0):
        raise UserError(
            "the CUDA kernels need compute capability 7.0 or newer; this GPU has "
            f"{dotted(capability)}. Use `model.mixing_backend=dense`."
        )
    digits = f"{capability[0]}{capability[1]}"
    if capability == (9, 0):
        # 9.0a: Hopper's own instructions (wgmma, TMA), which plain sm_90 leaves out.
        return [HOPPER_FLAG, "-gencode=arch=compute_90a,code=sm_90a"]
    return [f"-gencode=arch=compute_{digits},code=sm_{digits}"]


# ------------------------------------------------------------------------- nvcc


def find_nvcc() -> Path:
    """The nvcc of $CUDA_HOME, $PATH, a wheel or /usr/local/cuda, the first that there is. Raises
    UserError where there is none.
    """
    cuda_home = os.environ.get("CUDA_HOME")
    candidates = [cuda_home and f"{cuda_home}/bin/nvcc", shutil.which("nvcc")]
    wheels = importlib.util.find_spec("nvidia")
    if wheels is not None:
        # A namespace package has one location for each site-packages.
        for folder in wheels.submodule_search_locations or []:
            candidates.append(f"{folder}/cu13/bin/nvcc")  # CUDA 12's wheels have no nvcc
    candidates.append("/usr/local/cuda/bin/nvcc")
    executables = [Path(path) for path in candidates if path and os.access(path, os.X_OK)]
    if not executables:
        raise UserError(
            "the CUDA kernels need nvcc, and there is none in $CUDA_HOME, $PATH or the "
            "nvidia-cuda-nvcc wheel. Point CUDA_HOME at a CUDA toolkit, or install nvcc with "
            "`pip install 'cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]'`."
        )
    nvcc = executables[0]
    # nvcc looks for its headers beside the path that it is called by, even if that is a link. A
    # link to ccache must stay: its name says what ccache is to run.
    return nvcc.resolve() if nvcc.resolve().name.startswith("nvcc") else nvcc


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# ------------------------------------------------------------------------- command


def capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("python -m mixer.ops.build", "Build or rebuild the CUDA kernels.")
    parser.add_argument(
        "--arch",
        nargs="+",
        type=capability,
        metavar="9.0",
        help="compute capabilities (default: the GPUs here)",
    )
    here = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    capabilities = parser.parse_args(arguments).arch or here
    if not capabilities:
        raise UserError(
            "there is no GPU here to build for. Name one: `python -m mixer.ops.build --arch 9.0`."
        )
    for version in capabilities:
        path = library(version, rebuild=True)
        print(f"compute capability {dotted(version)}: {path}")
        print(f"registers and spills of each kernel: {path.with_name(LOG)}")


if __name__ == "__main__":
    run_command(main)
