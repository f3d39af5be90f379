"""Builds the CUDA kernels in `csrc` into one shared library, once per machine, and finds it again.

The library has a plain C interface and includes no torch header, so it depends on the GPU's
architecture and on nvcc, not on the version of torch; it builds in seconds, also on a machine
without a GPU:

    python -m mixer.ops.build --arch 9.0

The library is kept in `$MIXER_CACHE` (or `${XDG_CACHE_HOME:-~/.cache}/mixer`) under a name made of
the architecture, the sources and the compiler. A change of any of them builds anew, so a stale
library is never loaded.
"""

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mixer.common.checksums import cache_home
from mixer.common.errors import run_command
from mixer.common.locks import locked
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
TEMPORARY = ".tmp"  # ends the name of a directory that is being built in
COMPILE_FLAGS = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v"]
LOG_TAIL = 30  # lines of the compiler's output that an error quotes
NAME_ANOTHER = "Name another: `export MIXER_CACHE=/a/directory/of/yours`."

# What compilers print when the cause is not in our sources, and the fix.
KNOWN_FAILURES = {
    "unsupported GNU version": "This nvcc does not accept this g++; name an older one: "
    "`export NVCC_PREPEND_FLAGS='-ccbin g++-12'`.",
    "No space left on device": "The disk is full; name another: "
    "`export MIXER_CACHE=/a/directory/with/space`.",
    "No such file or directory": "Headers of the CUDA toolkit are missing; for the nvcc that comes "
    "as a wheel: `pip install nvidia-cuda-runtime nvidia-cuda-cccl`.",
    "host compiler": "nvcc needs a host compiler: `apt-get install g++`.",
    "gcc: not found": "nvcc needs a host compiler: `apt-get install g++`.",
}


# ------------------------------------------------------------------------- cache


def cache_path() -> Path:
    """Where the cache is or would be."""
    try:
        return cache_home() / "kernels"
    except RuntimeError as error:  # a container may run as a user who has none
        raise BuildError(f"there is no home for the cache ({error}). {NAME_ANOTHER}") from error


def cache_directory() -> Path:
    """The cache, made (mode 0700) if it is not there. Raises BuildError where it is not ours alone
    to write.
    """
    directory = cache_path()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_shared(directory)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise BuildError(f"cannot write to {directory} ({error}). {NAME_ANOTHER}") from error
    return directory


def refuse_shared(directory: Path) -> Path:
    """The directory itself. Raises BuildError where others could have put a library there: loading
    it runs their code.
    """
    status = directory.stat()
    why = "A library is loaded from there as code, so it must be yours, and writable for you alone."
    if status.st_uid != os.geteuid():
        raise BuildError(
            f"{directory} belongs to user {status.st_uid}; you are user {os.geteuid()}. {why} "
            f"{NAME_ANOTHER}"
        )
    if status.st_mode & 0o022:
        raise BuildError(
            f"others can write to {directory} (mode {stat.S_IMODE(status.st_mode):04o}). {why} "
            f"Close it with `chmod 700 {shlex.quote(str(directory))}`, or set MIXER_CACHE to a "
            "directory of yours."
        )
    return directory


def source_files(sources: Path) -> list[Path]:
    return sorted(path for path in sources.iterdir() if path.suffix in (".cu", ".cuh", ".h"))


def digest(*parts: bytes) -> str:
    """16 hex digits over the parts and where each ends."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]


def source_name(capability: tuple[int, int], sources: Path) -> str:
    """The part of a build's name that does not depend on the compiler."""
    content = [
        part for path in source_files(sources) for part in (path.name.encode(), path.read_bytes())
    ]
    return f"sm{capability[0]}{capability[1]}-{digest(platform.machine().encode(), *content)}"


def build_name(
    capability: tuple[int, int], sources: Path, compiler: Compiler, flags: list[str]
) -> str:
    toolchain = " ".join([str(compiler.path), dotted(compiler.version), *flags])
    return f"{source_name(capability, sources)}-{digest(toolchain.encode())}"


def prebuilt(capability: tuple[int, int], sources: Path) -> Path | None:
    """A whole library of these very sources that some compiler left in the cache: enough for a
    machine without nvcc.
    """
    places = cache_directory().glob(f"{source_name(capability, sources)}-*/{LIBRARY}")
    # In a builder's temporary directory the linker may still be writing, or was killed.
    found = sorted(path for path in places if path.parent.suffix != TEMPORARY)
    return refuse_shared(found[-1].parent) / LIBRARY if found else None


# ------------------------------------------------------------------------- building


def library(capability: tuple[int, int], sources: Path = SOURCES) -> Path:
    """The library for a GPU of this compute capability, built first if the cache has none.

    Processes that ask at the same time wait for one of them to build. Raises BuildError.
    """
    try:
        compiler = find_compiler()
    except BuildError:
        if found := prebuilt(capability, sources):
            return found
        raise
    flags = [*COMPILE_FLAGS, *architecture_flags(compiler, capability)]
    directory = cache_directory() / build_name(capability, sources, compiler, flags)
    if not (directory / LIBRARY).exists():
        with locked(directory.with_suffix(".lock")):
            if not (directory / LIBRARY).exists():
                build(directory, sources, compiler, flags)
    return refuse_shared(directory) / LIBRARY


def build(directory: Path, sources: Path, compiler: Compiler, flags: list[str]) -> None:
    """Builds into a temporary directory and renames it to `directory`: what has that name is
    complete.
    """
    architecture = flags[-1].rpartition("=")[2]
    # Left by a builder that was killed, since we hold the lock.
    for leftover in directory.parent.glob(f"{directory.name}.*{TEMPORARY}"):
        shutil.rmtree(leftover, ignore_errors=True)
    print(
        f"mixer: building CUDA kernels for {architecture} (once, up to a minute)",
        file=sys.stderr,
        flush=True,
    )
    # A name of its own each time: the compilers of a killed builder may live on for a while and
    # write into the old one.
    temporary = Path(
        tempfile.mkdtemp(prefix=f"{directory.name}.", suffix=TEMPORARY, dir=directory.parent)
    )
    try:
        succeeds, output = compile_library(temporary, sources, compiler, flags)
        (temporary / LOG).write_text(output)
        if not succeeds:
            raise compiler_error(directory, compiler, output)
        for rubbish in temporary.glob("*.o"):
            rubbish.unlink()
        # Fails if another machine was first: flock does not reach across all shared file systems.
        with contextlib.suppress(OSError):
            temporary.rename(directory)
        if not (directory / LIBRARY).exists():
            raise BuildError(
                f"cannot rename {temporary} to {directory}. Name another cache: `export "
                "MIXER_CACHE=/a/directory`."
            )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def compile_library(
    directory: Path, sources: Path, compiler: Compiler, flags: list[str]
) -> tuple[bool, str]:
    """One object for each .cu, then the library with the CUDA runtime in it: no libcudart has to be
    found later. Returns whether that went well, and all that nvcc printed.
    """
    units = [path for path in source_files(sources) if path.suffix == ".cu"]
    if HOPPER_FLAG not in flags:
        units = [path for path in units if not path.name.startswith("hopper")]
    # The nvcc wheel keeps its runtime in lib, where its own profile says lib64.
    lib = compiler.path.parent.parent / "lib"
    search = [f"-L{lib}"] if (lib / "libcudart_static.a").exists() else []
    link = [str(compiler.path), "-shared", "-cudart=static", flags[-1], *search]
    rules = {
        "compile": f"{in_ninja([str(compiler.path), *flags])} -c $in -o $out",
        "link": f"{in_ninja(link)} $in -o $out",
    }
    lines = [f"rule {name}\n  command = {command}" for name, command in rules.items()]
    lines += [f"build {unit.stem}.o: compile {escaped(str(unit))}" for unit in units]
    lines += [f"build {LIBRARY}: link {' '.join(f'{unit.stem}.o' for unit in units)}", ""]
    (directory / "build.ninja").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "ninja", "-C", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode == 0, done.stdout.decode(errors="replace")


def in_ninja(command: list[str]) -> str:
    """A command as ninja reads it."""
    return shlex.join(command).replace("$", "$$")


def escaped(path: str) -> str:
    """A path as ninja reads it in a line that builds."""
    return path.replace("$", "$$").replace(":", "$:").replace(" ", "$ ")


def compiler_error(directory: Path, compiler: Compiler, output: str) -> BuildError:
    """An error with the end of the log, the path of the log, and the fix where we know one."""
    log = directory.with_suffix(".failed.log")
    log.write_text(output)
    noise = re.compile(r"\[\d+/|ptxas info|.* bytes stack frame")
    lines = [line for line in output.splitlines() if not noise.match(line)]
    fix = next((fix for sign, fix in KNOWN_FAILURES.items() if sign in output), None)
    return BuildError(
        f"nvcc {dotted(compiler.version)} ({compiler.path}) could not build the CUDA kernels; its "
        "last words:\n"
        + "\n".join(lines[-LOG_TAIL:])
        + f"\nThe whole log: {log}\n"
        + (fix or "Try another CUDA toolkit: `export CUDA_HOME=/path/to/cuda`.")
    )


# ------------------------------------------------------------------------- report


def report(capability: tuple[int, int]) -> None:
    """Builds for one architecture and says where the library is."""
    start = time.perf_counter()
    path = library(capability)
    print(f"architecture {dotted(capability)}: {path} ({time.perf_counter() - start:.1f} s)")
    print(f"registers and spills of each kernel: {path.parent / LOG}")


def present_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of this machine's GPUs."""
    import torch

    indices = range(torch.cuda.device_count())
    return sorted({torch.cuda.get_device_capability(index) for index in indices})


def parse_capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)a?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability; write it as 9.0")
    return int(match[1]), int(match[2])


def main(arguments: list[str] | None = None) -> None:
    """The command line: builds and reports."""
    parser = argparse.ArgumentParser(
        prog="python -m mixer.ops.build", description="Build CUDA kernels ahead of time."
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        type=parse_capability,
        metavar="9.0",
        help="compute capabilities (default: the GPUs here)",
    )
    options = parser.parse_args(arguments)
    capabilities = options.arch or present_capabilities()
    if not capabilities:
        raise BuildError(
            "there is no GPU here to build for. Name one: `python -m mixer.ops.build --arch 9.0`."
        )
    compiler = find_compiler()
    print(f"nvcc {dotted(compiler.version)}: {compiler.path}")
    for capability in capabilities:
        report(capability)


if __name__ == "__main__":
    run_command(main)
