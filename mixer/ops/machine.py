"""The facts about this machine from which mixer.ops.diagnosis tells whether the kernels will work.

A missing tool or GPU is a fact, not an error. Kernels that are not built yet are built and tried,
since only running them shows that they run.
"""

import ctypes
import dataclasses
import fcntl
import glob
import os
import re
import shutil
import stat
import subprocess
import warnings
from pathlib import Path

import torch

from mixer.ops import build, choice, cuda, toolchain
from mixer.ops.diagnosis import Cache, Facts, Gpu, Version


def output(*command: str) -> str | None:
    """What a command prints, or None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def in_container() -> bool:
    signs = r"docker|containerd|kubepods|libpod|lxc"
    return any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv"))) or bool(
        re.search(signs, read("/proc/1/cgroup"))
    )


def driver_facts(initialise: bool) -> dict:
    """cuInit is asked only where torch sees no GPU: elsewhere it has answered already."""
    named = re.search(r"\d+\.\d[.\d]*", read("/proc/driver/nvidia/version"))
    facts = dict(
        driver_library=False, driver=named[0] if named else None, driver_cuda=None, cuda_init=None
    )
    supported = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuDriverGetVersion(ctypes.byref(supported))
        if initialise:
            facts["cuda_init"] = library.cuInit(0)
    except (OSError, AttributeError):
        return facts
    cuda_version = (
        (supported.value // 1000, supported.value % 1000 // 10) if supported.value else None
    )
    return facts | dict(driver_library=True, driver_cuda=cuda_version)


def torch_facts() -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own words on an old driver: ours say more
        devices = (
            torch.cuda.device_count() if torch.version.cuda and torch.cuda.is_available() else 0
        )
        arches = torch.cuda.get_arch_list()
    try:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, TypeError):  # a build without NCCL
        nccl = None
    version = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "")
    return dict(
        torch=torch.__version__,
        torch_cuda=(int(version[1]), int(version[2])) if version else None,
        torch_arches=arches,
        torch_devices=devices,
        nccl=nccl,
    )


def tool_facts() -> dict:
    nvcc = nvcc_error = ninja = None
    try:
        nvcc = toolchain.find_compiler()
    except toolchain.BuildError as error:
        nvcc_error = str(error)
    try:
        command = toolchain.find_ninja()
        if version := output(*command, "--version"):
            ninja = f"{version} ({' '.join(command)})"
    except toolchain.BuildError:
        pass
    named = re.search(
        r"(?:-ccbin|--compiler-bindir)[= ](\S+)", os.environ.get("NVCC_PREPEND_FLAGS", "")
    )
    host = named[1] if named else os.environ.get("NVCC_CCBIN") or "g++"
    version = output(host, "--version")
    folders = sorted(
        glob.glob("/usr/local/cuda-*"),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path)],
    )
    toolkits = {
        path.partition("cuda-")[2]: path
        for path in folders
        if os.access(f"{path}/bin/nvcc", os.X_OK)
    }
    compiler = f"{version.splitlines()[0]} ({shutil.which(host)})" if version else None
    return dict(
        nvcc=nvcc, nvcc_error=nvcc_error, toolkits=toolkits, ninja=ninja, host_compiler=compiler
    )


def cache_facts() -> Cache:
    path = error = None
    try:
        path = build.cache_path()
        build.cache_directory()
    except toolchain.BuildError as problem:
        error = str(problem)
    try:
        status = os.stat(path or "")
        found = {str(lock): holders(lock) for lock in path.glob("*.lock")}
    except OSError:
        return Cache(str(path), error=error)
    builders = {lock: pids for lock, pids in found.items() if pids is not None}
    return Cache(str(path), stat.S_IMODE(status.st_mode), status.st_uid, error, builders)


def holders(lock: Path) -> list[int] | None:
    """Processes that hold an flock on the file, as far as /proc/locks shows them; None: nobody
    holds it.

    A lock goes with its process, so the file alone means nothing.
    """
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except BlockingIOError:
        # those who wait have an arrow before FLOCK
        line = rf"(?m)^\d+: FLOCK .* (\d+) \w+:\w+:{os.stat(lock).st_ino} "
        # 0: a process of another container
        return [int(pid) for pid in re.findall(line, read("/proc/locks")) if pid != "0"]
    except OSError:
        return None


def gpu_facts(devices: int, cache: Cache) -> list[Gpu]:
    try:
        return [torch_gpu(index, cache) for index in range(devices)] or listed_gpus()
    except RuntimeError as error:  # one that has stopped answering
        return [dataclasses.replace(gpu, reason=str(error)) for gpu in listed_gpus()]


def torch_gpu(index: int, cache: Cache) -> Gpu:
    """One that torch sees; its kernels are built, loaded and tried, unless someone else is building
    them.
    """
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    gpu = Gpu(properties.name, capability, memory_of(index))
    name = build.source_name(capability, build.SOURCES)
    if built_library(capability) is None and any(name in lock for lock in cache.builders):
        return dataclasses.replace(gpu, reason="another process is building the kernels")
    loads = False
    try:
        cuda.kernels(index)
        loads = True
        reason = choice.device_reason(index)
    except Exception as error:  # whatever a broken driver makes of it is what we came for
        reason = str(error)
    return dataclasses.replace(gpu, library=built_library(capability), loads=loads, reason=reason)


def memory_of(index: int) -> tuple[float, float] | None:
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError:  # a full GPU has no room even for the question
        return None
    return round(free / 2**30, 1), round(total / 2**30, 1)


def built_library(capability: Version) -> str | None:
    try:
        found = build.prebuilt(capability, build.SOURCES)
        return str(found) if found else None
    except toolchain.BuildError:
        return None


def listed_gpus() -> list[Gpu]:
    query = "--query-gpu=compute_cap,memory.free,memory.total,name"
    rows = re.findall(
        r"(\d+)\.(\d+), (\d+), (\d+), (.+)",
        output("nvidia-smi", query, "--format=csv,noheader,nounits") or "",
    )
    return [
        Gpu(
            name,
            (int(major), int(minor)),
            (round(int(free) / 1024, 1), round(int(total) / 1024, 1)),
        )
        for major, minor, free, total, name in rows
    ]


def gather() -> Facts:
    of_torch, cache = torch_facts(), cache_facts()
    return Facts(
        user=os.geteuid(),
        container=in_container(),
        # dxg: the Windows Subsystem for Linux
        devices=sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg")),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cache=cache,
        gpus=gpu_facts(of_torch["torch_devices"], cache),
        **driver_facts(initialise=of_torch["torch_devices"] == 0),
        **of_torch,
        **tool_facts(),
    )
