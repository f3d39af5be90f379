"""Compiles the CUDA kernels for GPUs from V100 to Blackwell, into mixer/ops/prebuilt, and builds a
wheel that brings them: `make wheel`.

All compilers but g++ come from pip. It has no nvcc older than CUDA 13's, whose machine code and
runtime need a driver of CUDA 13, and which does not know 7.0. So nvcc compiles to PTX, for 7.0 that
of 7.5, and the assembler and the runtime are those of CUDA 12.9, which serve all drivers from CUDA
12.0 on. The assembler refuses PTX that is too new for it or for the GPU.
"""

import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from mixer.common.errors import run_command
from mixer.common.files import whole_directory
from mixer.ops import build

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/wheel"
COMPILERS = [
    "cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.2",
    "nvidia-cuda-nvcc-cu12==12.9.86",  # the assembler
    "nvidia-cuda-runtime-cu12==12.9.79",
]
CAPABILITIES = [(7, 0), (8, 0), (9, 0), (10, 0), (12, 0)]  # and what is newer by a minor version

# What nvcc calls in place of the assembler and of `fatbinary`, which packs machine code.
TOOL_OF_CUDA_12 = r"""#!/bin/sh
for argument do
    case $argument in
    *.ptx)
        sed -i 's/^\.version 9\.[0-9]/.version 8.8/; s/^\.target sm_75/.target sm_70/' "$argument"
        ;;
    esac
    shift
    set -- "$@" "$(printf %s "$argument" | sed 's/sm\([_=]\)75/sm\170/')"
done
exec {tool} "$@"
"""


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.rmtree(build.PREBUILT, ignore_errors=True)
    build.PREBUILT.mkdir()
    nvcc = assemble_toolkit(install_compilers())
    libraries = [build_library(capability, nvcc) for capability in CAPABILITIES]
    wheel = build_wheel(platform_tag(libraries))
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB")


def install_compilers() -> Path:
    packages = WORK / "compilers"
    pip("install", "--target", packages, *COMPILERS)
    return packages / "nvidia"


def assemble_toolkit(packages: Path) -> Path:
    """A CUDA toolkit of links to the packages' parts. Returns its nvcc, which finds the other parts
    from the path that it is called by.
    """
    home = WORK / "toolkit"
    (home / "bin").mkdir(parents=True)
    for part in (packages / "cu13/bin").iterdir():
        (home / "bin" / part.name).symlink_to(part)
    (home / "nvvm").symlink_to(packages / "cu13/nvvm")
    (home / "include").symlink_to(packages / "cu13/include")
    (home / "lib").symlink_to(packages / "cuda_runtime/lib")
    for tool in (packages / "cuda_nvcc/bin/ptxas", packages / "cu13/bin/fatbinary"):
        path = home / "bin" / tool.name
        path.unlink()
        path.write_text(TOOL_OF_CUDA_12.format(tool=shlex.quote(str(tool))))
        path.chmod(0o755)
    return home / "bin/nvcc"


def build_library(capability: tuple[int, int], nvcc: Path) -> Path:
    """The library, where build.py looks for it."""
    print(f"building the kernels for compute capability {build.dotted(capability)}", flush=True)
    flags = build.architecture_flags((7, 5) if capability == (7, 0) else capability)
    directory = build.PREBUILT / build.build_name(capability, build.SOURCES)
    with whole_directory(directory) as stage:
        build.build(stage, build.SOURCES, nvcc, flags)
    return directory / build.LIBRARY


def platform_tag(libraries: list[Path]) -> str:
    """The systems whose glibc has every symbol that the libraries ask for."""
    command = ["objdump", "--dynamic-syms", *libraries]
    symbols = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    minor = max(int(minor) for minor in re.findall(r"\(GLIBC_2\.(\d+)", symbols))
    return f"manylinux_2_{minor}_{platform.machine()}"


def build_wheel(tag: str) -> Path:
    """Of a copy, as setuptools leaves files in its source, and packs those of earlier times."""
    source = WORK / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mixer", source / "mixer", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    option = f"--config-settings=--build-option=--plat-name={tag}"
    pip("wheel", "--no-deps", option, "--wheel-dir", WORK, source)
    (wheel,) = WORK.glob("*.whl")
    return wheel


def pip(*arguments) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    run_command(main)
