"""Why the CUDA kernels do not work on a machine: facts about it, and what follows from them.

Of the tools, the cache and the kernels the builder says itself what is missing and what to do: here
is what lies below, the driver and torch.
"""

import ctypes
import glob
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mixer.ops import build, choice, toolchain

Version = tuple[int, int]

# the last that knows V100, and the first for CUDA 13
INSTALL_DRIVER = "sudo apt-get install -y nvidia-driver-580-server"
NO_DEVICE = 100  # of cuInit
# Other results of cuInit where the driver is there but does not work: what each means, and its fix.
CUDA_INIT = {
    802: (
        "NVSwitch is not up, without which the GPUs of this machine do not start",
        "sudo systemctl start nvidia-fabricmanager",
    ),
    803: (
        "the driver's library and its kernel module are of different versions, as after an update",
        "sudo reboot",
    ),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees, or, where it sees none, one that nvidia-smi lists. `reason`: why our
    kernels do not run.
    """

    name: str
    capability: Version
    reason: str | None = "torch does not see this GPU"


@dataclass(frozen=True)
class Facts:
    """What is here. None: not there, or not to be found out."""

    container: bool
    devices: list[str]  # the GPUs' device files
    driver_library: bool
    driver_cuda: Version | None
    cuda_init: int | None  # what cuInit returned
    visible: str | None  # $CUDA_VISIBLE_DEVICES
    torch: str
    torch_cuda: Version | None
    torch_arches: list[str]
    torch_devices: int
    nvcc: str | None
    host_compiler: str | None
    cache: str | None
    missing: list[str]  # what the builder says of nvcc and the cache
    gpus: list[Gpu]

    @property
    def works(self) -> bool:
        return self.torch_devices > 0 and all(gpu.reason is None for gpu in self.gpus)


@dataclass(frozen=True)
class Problem:
    what: str
    fix: str  # one command


# ------------------------------------------------------------------------- what follows


def judge(facts: Facts) -> list[Problem]:
    """What is wrong, causes before effects. None where the kernels work."""
    if facts.works:
        return []
    found = [*sight_problems(facts), *torch_problems(facts)]
    if not found and not facts.torch_devices:
        what = "torch sees no GPU, although the driver is there and starts"
        found.append(Problem(what, "python -m torch.utils.collect_env"))
    below = bool(found)
    found += [Problem(what, command_in(what)) for what in facts.missing]
    for gpu in facts.gpus:
        if gpu.reason and not below and gpu.reason not in facts.missing:
            what = f"the kernels do not run on {gpu.name}: {gpu.reason}"
            found.append(Problem(what, command_in(gpu.reason)))
    return list(dict.fromkeys(found))  # four GPUs of one kind have one problem


def sight_problems(facts: Facts) -> Iterator[Problem]:
    """Why torch sees no GPU, where the cause lies below torch."""
    if facts.torch_devices:
        return
    if facts.container and not facts.devices:
        what = "no GPU reaches this container: it was started without GPUs, or its host has none"
        yield Problem(what, "docker run --gpus all ...")
    elif not facts.driver_library:
        inside = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
        what = "there is no NVIDIA driver: no libcuda.so.1, which every CUDA program needs"
        yield Problem(what, inside if facts.container else INSTALL_DRIVER)
    elif not facts.devices:
        what = (
            "the NVIDIA driver offers no GPU: its kernel module is not loaded, or this machine has "
            "none"
        )
        yield Problem(what, "sudo modprobe nvidia")
    elif facts.cuda_init == NO_DEVICE and facts.visible is not None:
        what = f"CUDA_VISIBLE_DEVICES={facts.visible!r} hides every GPU"
        yield Problem(what, "unset CUDA_VISIBLE_DEVICES")
    elif facts.cuda_init:
        unknown = ("the driver is there but does not start", "nvidia-smi -q")
        means, fix = CUDA_INIT.get(facts.cuda_init, unknown)
        yield Problem(f"the NVIDIA driver fails with CUDA error {facts.cuda_init}: {means}", fix)


def torch_problems(facts: Facts) -> Iterator[Problem]:
    name, driver = f"torch {facts.torch}", facts.driver_cuda
    if facts.torch_cuda is None:
        what = f"{name} is built without CUDA: it is for CPUs or AMD's GPUs"
        yield Problem(what, torch_command(facts))
        return
    if driver and driver[0] < facts.torch_cuda[0]:  # it serves every minor version of its own
        what = (
            f"the driver is too old for {name}: it supports CUDA {toolchain.dotted(driver)}, "
            f"torch needs {facts.torch_cuda[0]}.x"
        )
        yield Problem(what, torch_command(facts) if driver >= (12, 0) else INSTALL_DRIVER)
    for gpu in facts.gpus:
        if facts.torch_arches and not serves(facts.torch_arches, gpu.capability):
            what = (
                f"{name} is not built for {gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]}), "
                f"but for {' '.join(facts.torch_arches)}"
            )
            yield Problem(what, torch_command(facts))


def serves(arches: list[str], capability: Version) -> bool:
    """Machine code (sm_86) serves its own major version from its minor on, PTX (compute_80) all
    that is newer.
    """
    for kind, digits, suffix in re.findall(r"(sm|compute)_(\d+)([af]?)", " ".join(arches)):
        arch = divmod(int(digits), 10)
        if arch == capability or (
            arch <= capability and suffix != "a" and (kind == "compute" or arch[0] == capability[0])
        ):
            return True
    return False


def torch_command(facts: Facts) -> str:
    """Installs a torch for the GPUs and the driver here."""
    # without force pip is content with the version that is there
    command = "pip install --force-reinstall torch"
    is_old = any(gpu.capability < (7, 5) for gpu in facts.gpus)  # which CUDA 13 has left behind
    if not is_old and (facts.driver_cuda is None or facts.driver_cuda >= (13, 0)):
        return command
    blackwell = any(gpu.capability >= (10, 0) for gpu in facts.gpus)
    build_of = "cu128" if blackwell else "cu126"
    return f"{command} --index-url https://download.pytorch.org/whl/{build_of}"


def command_in(reason: str) -> str:
    """The command that a message of the builder names, at its end."""
    commands = re.findall(r"`([^`\n]+)`", reason)
    return commands[-1] if commands else "python -m mixer.ops.build"


# ------------------------------------------------------------------------- facts


def gather() -> Facts:
    """Kernels that are not built yet are built and tried: only running them shows that they run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own words on an old driver: ours say more
        has_cuda = torch.version.cuda and torch.cuda.is_available()
        devices = torch.cuda.device_count() if has_cuda else 0
        arches = torch.cuda.get_arch_list()
    version = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "")
    nvcc, no_nvcc = asked(toolchain.find_compiler)
    cache, no_cache = asked(build.cache_directory)
    host = os.environ.get("NVCC_CCBIN") or "g++"
    return Facts(
        container=in_container(),
        # dxg: the Windows Subsystem for Linux
        devices=sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg")),
        **driver_facts(initialise=devices == 0),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch=torch.__version__,
        torch_cuda=(int(version[1]), int(version[2])) if version else None,
        torch_arches=arches,
        torch_devices=devices,
        nvcc=f"{toolchain.dotted(nvcc.version)} ({nvcc.path})" if nvcc else None,
        host_compiler=shutil.which(host),
        cache=str(cache) if cache else None,
        missing=[reason for reason in (no_nvcc, no_cache) if reason],
        gpus=[torch_gpu(index) for index in range(devices)] or listed_gpus(),
    )


def asked(find):
    """What the builder finds, or why it does not."""
    try:
        return find(), None
    except toolchain.BuildError as error:
        return None, str(error)


def in_container() -> bool:
    cgroup = Path("/proc/1/cgroup")
    text = cgroup.read_text() if cgroup.exists() else ""
    signs = r"docker|containerd|kubepods|libpod|lxc"
    marked = any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
    return marked or bool(re.search(signs, text))


def driver_facts(initialise: bool) -> dict:
    """cuInit is asked only where torch sees no GPU: elsewhere it has answered already."""
    supported = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuDriverGetVersion(ctypes.byref(supported))
        status = library.cuInit(0) if initialise else None
    except (OSError, AttributeError):
        return {"driver_library": False, "driver_cuda": None, "cuda_init": None}
    version = (supported.value // 1000, supported.value % 1000 // 10) if supported.value else None
    return {"driver_library": True, "driver_cuda": version, "cuda_init": status}


def torch_gpu(index: int) -> Gpu:
    try:
        reason = choice.device_reason(index)
    except Exception as error:  # whatever a broken driver makes of it is what we came for
        reason = str(error)
    return Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), reason)


def listed_gpus() -> list[Gpu]:
    command = ["nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = re.findall(r"(\d+)\.(\d+), (.+)", text)
    return [Gpu(name, (int(major), int(minor))) for major, minor, name in rows]
