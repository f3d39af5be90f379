"""Builds the CUDA kernels in `csrc` into one shared library, once per machine, and finds it again.

The library has a plain C interface and includes no torch header, so it depends on the GPU and not
on the version of torch. It builds in less than a minute, also on a machine without a GPU:

    python -m mixer.ops.build --arch 9.0

The library is kept in `$MIXER_CACHE` (or `${XDG_CACHE_HOME:-~/.cache}/mixer`) under a name made of
the architecture and the sources, so a stale library is never loaded. The command builds in any
case, for example by another compiler.
"""

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from mixer.common.errors import run_command
from mixer.common.files import cache_home, whole_directory
from mixer.ops.toolchain import (
    HOPPER_FLAG,
    BuildError,
    Compiler,
    architecture_flags,
    dotted,
    find_compiler,
)

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libmixer_kernels.so"
LOG = "build.log"
COMPILE_FLAGS = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v"]
LOG_TAIL = 30  # lines of the compiler's output that an error quotes


# ------------------------------------------------------------------------- cache


def library(capability: tuple[int, int], sources: Path = SOURCES, rebuild: bool = False) -> Path:
    """The library for a GPU of this compute capability, built first if the cache has none, or if
    `rebuild` is set.

    Processes that ask at the same time wait for one of them to build. Raises UserError.
    """
    directory = cache_directory() / build_name(capability, sources)
    path = directory / LIBRARY
    if rebuild or not path.exists():
        compiler = find_compiler()
        flags = [*COMPILE_FLAGS, *architecture_flags(compiler, capability)]
        with whole_directory(directory) as stage:
            if rebuild or not path.exists():  # no other process has built it meanwhile
                build(stage, sources, compiler, flags, directory.with_suffix(".failed.log"))
    return path


def cache_directory() -> Path:
    """The cache, made (mode 0700) if it is not there. Raises BuildError where others could put a
    library there, since loading it runs their code.
    """
    another = "`export MIXER_CACHE=/a/directory/of/yours`"
    try:
        directory = cache_home() / "kernels"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except (OSError, RuntimeError) as error:  # a user in a container may have no home
        raise BuildError(f"there is no cache for the kernels ({error}): {another}.") from error
    why = "a library is loaded from there as code, so it must be yours, and writable for you alone"
    if status.st_uid != os.geteuid():
        raise BuildError(f"{directory} belongs to user {status.st_uid}; {why}: {another}.")
    if status.st_mode & 0o022:
        fix = f"`chmod 700 {shlex.quote(str(directory))}`"
        raise BuildError(f"others can write to {directory}; {why}: {fix}.")
    return directory


def build_name(capability: tuple[int, int], sources: Path) -> str:
    total = hashlib.sha256(platform.machine().encode())
    for path in source_files(sources):
        total.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return f"sm{capability[0]}{capability[1]}-{total.hexdigest()[:16]}"


def source_files(sources: Path) -> list[Path]:
    return sorted(path for path in sources.iterdir() if path.suffix in (".cu", ".cuh", ".h"))


# ------------------------------------------------------------------------- building


def build(
    directory: Path, sources: Path, compiler: Compiler, flags: list[str], failed_log: Path
) -> None:
    """Builds the library into a directory, with a log of the registers and spills of each kernel.
    Raises BuildError and writes `failed_log` if that fails.
    """
    architecture = flags[-1].rpartition("=")[2]
    said = f"mixer: building CUDA kernels for {architecture} (once, up to a minute)"
    print(said, file=sys.stderr, flush=True)
    directory.chmod(0o755)  # whatever the umask: others must not write there
    work = directory / "objects"
    work.mkdir()
    (work / "build.ninja").write_text(ninja_file(sources, compiler, flags))
    command = [sys.executable, "-m", "ninja", "-C", str(work)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        failed_log.write_text(output)
        raise compiler_error(failed_log, compiler, output)
    shutil.rmtree(work)
    (directory / LOG).write_text(output)


def ninja_file(sources: Path, compiler: Compiler, flags: list[str]) -> str:
    """One object for each .cu, then the library with the CUDA runtime in it: no libcudart has to be
    found later.
    """
    # The nvcc wheel keeps its runtime in lib, where its own profile says lib64.
    lib = compiler.path.parent.parent / "lib"
    search = [f"-L{lib}"] if (lib / "libcudart_static.a").exists() else []
    lines, objects = ["rule nvcc", "  command = $command"], []

    def add(made: str, of: list[str], arguments: list[str]) -> None:
        # Only the command has names with spaces and the like.
        command = shlex.join([str(compiler.path), *arguments, "-o", made]).replace("$", "$$")
        lines.extend([f"build {made}: nvcc {' '.join(of)}", f"  command = {command}"])

    for unit in source_files(sources):
        if unit.suffix == ".cu" and (HOPPER_FLAG in flags or not unit.name.startswith("hopper")):
            objects.append(f"{unit.stem}.o")
            add(objects[-1], [], [*flags, "-c", str(unit)])
    add(f"../{LIBRARY}", objects, ["-shared", "-cudart=static", flags[-1], *search, *objects])
    return "\n".join([*lines, ""])


def compiler_error(log: Path, compiler: Compiler, output: str) -> BuildError:
    """An error with the end of the log and its path."""
    noise = re.compile(r"\[\d+/|ptxas info|.* bytes stack frame")
    lines = [line for line in output.splitlines() if not noise.match(line)]
    end = "\n".join(lines[-LOG_TAIL:])
    return BuildError(
        f"nvcc {dotted(compiler.version)} ({compiler.path}) could not build the CUDA kernels; its "
        f"last words:\n{end}\nThe whole log: {log}\n"
        "Try another CUDA toolkit: `export CUDA_HOME=/path/to/cuda`."
    )


# ------------------------------------------------------------------------- command


def capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.ops.build", description="Build CUDA kernels ahead of time, or anew."
    )
    add, known = parser.add_argument, "compute capabilities (default: the GPUs here)"
    add("--arch", nargs="+", type=capability, metavar="9.0", help=known)
    here = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    wanted = parser.parse_args(arguments).arch or here
    if not wanted:
        raise BuildError(
            "there is no GPU here to build for. Name one: `python -m mixer.ops.build --arch 9.0`."
        )
    for pair in wanted:
        path = library(pair, rebuild=True)
        print(f"compute capability {dotted(pair)}: {path}")
        print(f"registers and spills of each kernel: {path.with_name(LOG)}")


if __name__ == "__main__":
    run_command(main)
