"""What is wrong with a machine, judged from facts about it: types, and rules without side effects.

`judge` takes facts, which `mixer.ops.machine` gathers, and gives problems, each with what it means
and the one command that fixes it.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from mixer.ops import toolchain

Version = tuple[int, int]

LAST_TOOLKIT = {11: "11.8", 12: "12.9", 13: "13.0"}  # of each CUDA major
# the last that knows V100, and the first for CUDA 13
INSTALL_DRIVER = "sudo apt-get install -y nvidia-driver-580-server"
NAME_CACHE = "export MIXER_CACHE=/a/directory/of/yours"
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
    memory: tuple[float, float] | None  # free, total, in GiB
    library: str | None = None
    loads: bool = False
    reason: str | None = "torch does not see this GPU"


@dataclass(frozen=True)
class Cache:
    path: str
    mode: int | None = None
    owner: int | None = None
    error: str | None = None  # why it cannot be used
    # Lock files held now, each with the processes that hold it.
    builders: dict[str, list[int]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What is here. None: not there, or not to be found out."""

    user: int
    container: bool
    devices: list[str]  # the GPUs' device files
    driver_library: bool
    driver: str | None
    driver_cuda: Version | None
    cuda_init: int | None  # what cuInit returned
    visible: str | None  # $CUDA_VISIBLE_DEVICES
    torch: str
    torch_cuda: Version | None
    torch_arches: list[str]
    torch_devices: int
    nccl: str | None
    nvcc: toolchain.Compiler | None
    nvcc_error: str | None
    toolkits: dict[str, str]  # other CUDA toolkits: version to path
    ninja: str | None
    host_compiler: str | None
    cache: Cache
    gpus: list[Gpu]


@dataclass(frozen=True)
class Problem:
    """`blocks`: with it the cuda backend does not work."""

    key: str
    what: str
    means: str
    fix: str  # one command
    blocks: bool = True


def judge(facts: Facts) -> list[Problem]:
    """What is wrong, causes before effects. Nothing that blocks: the cuda backend works."""
    found = [
        *sight_problems(facts),
        *torch_problems(facts),
        *cache_problems(facts),
        *tool_problems(facts),
    ]
    explained = any(problem.blocks for problem in found)
    if not explained and not (facts.gpus and facts.torch_devices):
        means = "the driver is there and starts; torch's own report may say more"
        found.append(
            Problem("no-gpu", "torch sees no GPU", means, "python -m torch.utils.collect_env")
        )
    elif not explained:
        found += [
            Problem(
                "kernels",
                f"the kernels do not run on {gpu.name}",
                gpu.reason,
                command_in(gpu.reason),
            )
            for gpu in facts.gpus
            if gpu.reason
        ]
    return list(dict.fromkeys(found))  # four GPUs of one kind have one problem


def sight_problems(facts: Facts) -> Iterator[Problem]:
    """Why torch sees no GPU, where the cause lies below torch."""
    if facts.torch_devices:
        return
    if facts.container and not facts.devices:
        means = "it has no /dev/nvidia*: it was started without GPUs, or its host has none"
        yield Problem(
            "container", "no GPU reaches this container", means, "docker run --gpus all ..."
        )
    elif not facts.driver_library:
        means = "there is no libcuda.so.1, which every CUDA program needs"
        fix = (
            "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
            if facts.container
            else INSTALL_DRIVER
        )
        yield Problem("no-driver", "there is no NVIDIA driver", means, fix)
    elif not facts.devices:
        means = (
            "there is no /dev/nvidia*: the driver's kernel module is not loaded, or this machine "
            "has no GPU"
        )
        yield Problem("no-device", "the NVIDIA driver offers no GPU", means, "sudo modprobe nvidia")
    elif facts.cuda_init == NO_DEVICE and facts.visible is not None:
        what = f"CUDA_VISIBLE_DEVICES={facts.visible!r} hides every GPU"
        yield Problem(
            "hidden",
            what,
            "CUDA programs see the GPUs that it numbers, from 0 on",
            "unset CUDA_VISIBLE_DEVICES",
        )
    elif facts.cuda_init:
        means, fix = CUDA_INIT.get(
            facts.cuda_init, ("the driver is there but does not start", "nvidia-smi -q")
        )
        yield Problem(
            "driver-broken",
            f"the NVIDIA driver fails with CUDA error {facts.cuda_init}",
            means,
            fix,
        )


def torch_problems(facts: Facts) -> Iterator[Problem]:
    if facts.torch_cuda is None:
        means = "it has no CUDA in it (a CPU-only or ROCm build), so that it uses no NVIDIA GPU"
        yield Problem(
            "torch-cpu", f"torch {facts.torch} is built without CUDA", means, torch_command(facts)
        )
        return
    if older(facts.driver_cuda, facts.torch_cuda):
        what = (
            f"the driver supports CUDA {toolchain.dotted(facts.driver_cuda)}; torch {facts.torch} "
            f"needs {facts.torch_cuda[0]}.x"
        )
        means = (
            "the driver is too old for this torch; a torch for an older CUDA needs no change of "
            "the driver"
        )
        fix = torch_command(facts) if facts.driver_cuda >= (12, 0) else INSTALL_DRIVER
        yield Problem("driver-old", what, means, fix)
    for gpu in facts.gpus:
        if facts.torch_arches and not serves(facts.torch_arches, gpu.capability):
            what = (
                f"torch {facts.torch} is not built for {gpu.name} "
                f"(sm_{gpu.capability[0]}{gpu.capability[1]})"
            )
            means = (
                f"none of its operations runs there; it is built for {' '.join(facts.torch_arches)}"
            )
            yield Problem("torch-arch", what, means, torch_command(facts))


def cache_problems(facts: Facts) -> Iterator[Problem]:
    cache = facts.cache
    ours = "its libraries are loaded as code, so it must be yours, and writable for you alone"
    if cache.owner is not None and cache.owner != facts.user:
        what = f"the cache {cache.path} belongs to user {cache.owner}; you are user {facts.user}"
        yield Problem("cache-owner", what, ours, NAME_CACHE)
    elif cache.mode is not None and cache.mode & 0o022:
        what = f"others can write to the cache {cache.path} (mode {cache.mode:04o})"
        yield Problem("cache-shared", what, ours, f"chmod 700 {shlex.quote(cache.path)}")
    elif cache.error:
        yield Problem(
            "cache-closed", "the cache cannot be written", first_sentence(cache.error), NAME_CACHE
        )
    for lock, pids in cache.builders.items():
        means = (
            f"it holds {lock}, and others wait for it; where it hangs, end it: its lock goes with "
            "it"
        )
        what = (
            f"process {' '.join(map(str, pids)) or '(of another container or machine)'} is "
            "building the kernels"
        )
        fix = f"kill {' '.join(map(str, pids))}" if pids else f"fuser -v {shlex.quote(lock)}"
        yield Problem(
            "building", what, means, fix, blocks=any(gpu.library is None for gpu in facts.gpus)
        )


def tool_problems(facts: Facts) -> Iterator[Problem]:
    """Of nvcc, ninja and g++: they do not block where the kernels are built."""
    unbuilt = not facts.gpus or any(gpu.library is None for gpu in facts.gpus)
    if facts.nvcc is None:
        yield Problem(
            "no-nvcc",
            "there is no nvcc that works",
            first_sentence(facts.nvcc_error or ""),
            toolkit_command(facts),
            unbuilt,
        )
    else:
        yield from nvcc_problems(facts, facts.nvcc)
    if facts.ninja is None:
        yield Problem(
            "no-ninja",
            "there is no ninja",
            "the kernels are built with it",
            "pip install ninja",
            unbuilt,
        )
    if facts.host_compiler is None:
        means = "nvcc compiles with it what runs on the CPU"
        yield Problem(
            "no-host-compiler",
            "there is no host compiler (g++)",
            means,
            "sudo apt-get install -y g++",
            unbuilt,
        )


def nvcc_problems(facts: Facts, nvcc: toolchain.Compiler) -> Iterator[Problem]:
    failing = not facts.gpus or any(gpu.reason for gpu in facts.gpus)
    version = toolchain.dotted(nvcc.version)
    for gpu in facts.gpus:
        old = gpu.capability < divmod(toolchain.OLDEST, 10)
        try:
            toolchain.architecture_flags(nvcc, gpu.capability)
        except toolchain.BuildError as error:
            what = (
                f"{'the kernels are not' if old else f'nvcc {version} does not compile'} for "
                f"{gpu.name}"
            )
            fix = (
                "accelerate launch train.py ... model.mixing_backend=dense"
                if old
                else toolkit_command(facts)
            )
            yield Problem(
                "gpu-old" if old else "nvcc-arch",
                what,
                first_sentence(str(error)),
                fix,
                bool(gpu.reason),
            )
    if older(facts.driver_cuda, nvcc.version):
        what = (
            f"nvcc {version} is newer than the driver, which supports CUDA "
            f"{toolchain.dotted(facts.driver_cuda)}"
        )
        yield Problem(
            "nvcc-driver",
            what,
            "what this nvcc builds does not start there",
            toolkit_command(facts),
            failing,
        )
    elif facts.torch_cuda and facts.torch_cuda[0] != nvcc.version[0]:
        what = f"nvcc is of CUDA {version}, torch of CUDA {toolchain.dotted(facts.torch_cuda)}"
        means = (
            "our kernels bring their own CUDA runtime, so both work as long as the driver serves "
            "the newer one"
        )
        yield Problem("nvcc-torch", what, means, toolkit_command(facts), blocks=False)


def older(driver: Version | None, wanted: Version) -> bool:
    """Whether the driver's CUDA is of an older major: a driver serves every minor version of its
    own.
    """
    return driver is not None and driver[0] < wanted[0]


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


def is_old(facts: Facts) -> bool:
    """Whether there is a GPU, such as a V100, that CUDA 13 has left behind."""
    return any(gpu.capability < (7, 5) for gpu in facts.gpus)


def torch_command(facts: Facts) -> str:
    """Installs a torch for the GPUs and the driver here."""
    # without force pip is content with the version that is there
    command = "pip install --force-reinstall torch"
    if not is_old(facts) and (facts.driver_cuda is None or facts.driver_cuda >= (13, 0)):
        return command
    blackwell = any(gpu.capability >= (10, 0) for gpu in facts.gpus)
    build_of = "cu128" if blackwell else "cu126"
    return f"{command} --index-url https://download.pytorch.org/whl/{build_of}"


def toolkit_command(facts: Facts) -> str:
    """Takes, or installs, an nvcc for the GPUs, the driver and torch."""
    majors = [version[0] for version in (facts.driver_cuda, facts.torch_cuda) if version]
    major = 12 if is_old(facts) else max(11, min([13, *majors]))
    found = [
        path for version, path in facts.toolkits.items() if version.partition(".")[0] == str(major)
    ]
    if found:
        return f"export CUDA_HOME={found[-1]}"
    if major == 13 and facts.nvcc is None:
        return "pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl"
    version = LAST_TOOLKIT[major]
    install = f"sudo apt-get install -y cuda-toolkit-{version.replace('.', '-')}"
    return f"{install} && export CUDA_HOME=/usr/local/cuda-{version}"


def first_sentence(message: str) -> str:
    """What a message of the build says is wrong, without the fix that it names: the doctor's own
    takes all facts into account.
    """
    return message.partition(". ")[0]


def command_in(reason: str) -> str:
    """The command that a message of the build names, at its end."""
    commands = re.findall(r"`([^`\n]+)`", reason)
    return commands[-1] if commands else "python -m mixer.ops.build"
