"""Compiles the CUDA kernels for GPUs from V100 to Blackwell, into mixer/ops/prebuilt, and builds a
wheel that brings them: `make wheel`.

All compilers but g++ come from pip. It has no nvcc older than CUDA 13's, whose machine code and
runtime need a driver of CUDA 13, and which does not know 7.0. So nvcc compiles to PTX, for 7.0 that
of 7.5, and the assembler and the runtime are those of CUDA 12.9, which serve all drivers from CUDA
12.0 on. The assembler refuses PTX that is too new for it or for the GPU.
"""

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mixer.common.errors import run_command
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
CUDA_12_TOOL = """#!{python} -IS
import os, re, sys
from pathlib import Path

arguments = [re.sub("sm([_=])75", r"sm\\g<1>70", argument) for argument in sys.argv[1:]]
for ptx in (Path(argument) for argument in arguments if argument.endswith(".ptx")):
    text = re.sub(r"^\\.version 9\\.\\d", ".version 8.8", ptx.read_text(), flags=re.MULTILINE)
    ptx.write_text(re.sub(r"^\\.target sm_75", ".target sm_70", text, flags=re.MULTILINE))
tool = {tools}[Path(sys.argv[0]).name]
os.execv(tool, [tool, *arguments])
"""


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.rmtree(build.PREBUILT, ignore_errors=True)
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
    tools = {
        "ptxas": str(packages / "cuda_nvcc/bin/ptxas"),
        "fatbinary": str(packages / "cu13/bin/fatbinary"),
    }
    for name in tools:
        path = home / "bin" / name
        path.unlink()
        path.write_text(CUDA_12_TOOL.format(python=sys.executable, tools=tools))
        path.chmod(0o755)
    return home / "bin/nvcc"


def build_library(capability: tuple[int, int], nvcc: Path) -> Path:
    """The library, where build.py looks for it. Its log stays in WORK."""
    print(f"building the kernels for compute capability {build.dotted(capability)}", flush=True)
    name = build.build_name(capability, build.SOURCES)
    stage = WORK / "kernels" / name
    stage.mkdir(parents=True)
    compiled_for = (7, 5) if capability == (7, 0) else capability
    build.build(stage, build.SOURCES, nvcc, build.architecture_flags(compiled_for))
    folder = build.PREBUILT / name
    folder.mkdir(parents=True)
    return shutil.copy(stage / build.LIBRARY, folder)


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
