"""Whether the CUDA kernels will work here, and if not, what to do: `python -m mixer.doctor
[--json]`.

Kernels that are not built yet are built. Status 0 if backend `cuda` will work, else 1. The builder
itself says what is wrong with the compiler, the cache and the kernels. Here is what lies below: the
driver and torch.
"""

import argparse
import ctypes
import glob
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from mixer.common.errors import UserError, run_command
from mixer.ops import build, choice, toolchain
from mixer.ops.toolchain import dotted
from mixer.reporting.tables import wrapped

Version = tuple[int, int]

# The last that knows V100, and the first for CUDA 13. Blackwell needs its open kernel modules.
INSTALL_DRIVER = "sudo apt-get install -y nvidia-driver-580-server"
BLACKWELL = (10, 0)
# What cuInit returns where the driver is there but does not work: what it means, and its fix.
CUDA_INIT = {
    100: ("no GPU, or none that CUDA_VISIBLE_DEVICES allows", "unset CUDA_VISIBLE_DEVICES"),
    802: ("NVSwitch, which the GPUs need, is not up", "sudo systemctl start nvidia-fabricmanager"),
    803: ("its library and its kernel module are of different versions", "sudo reboot"),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees, or, where it sees none, one that nvidia-smi lists. `reason`: why our
    kernels do not run; None if they do.
    """

    name: str
    capability: Version
    reason: str | None = "torch does not see this GPU"


@dataclass(frozen=True)
class Facts:
    """What is here. None: not there, or not to be found out."""

    container: bool
    devices: list[str]  # the GPUs' device files
    driver: Version | None  # the CUDA that it supports
    cuda_init: int | None  # what cuInit returned
    torch: str
    torch_cuda: Version | None
    torch_arches: list[str]
    torch_devices: int
    nvcc: str  # where it is, or why there is none
    cache: str
    gpus: list[Gpu]

    @property
    def works(self) -> bool:
        return self.torch_devices > 0 and all(gpu.reason is None for gpu in self.gpus)


class Problem(NamedTuple):
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
        found = [Problem(what, "python -m torch.utils.collect_env")]
    if not found:
        found = [
            Problem(f"the kernels do not run on {gpu.name}: {gpu.reason}", command_in(gpu.reason))
            for gpu in facts.gpus
            if gpu.reason
        ]
    return list(dict.fromkeys(found))  # four GPUs of one kind have one problem


def sight_problems(facts: Facts) -> Iterator[Problem]:
    """Why torch sees no GPU, where the cause lies below torch."""
    if facts.torch_devices:
        return
    if facts.container and (not facts.devices or facts.driver is None):
        what = "no GPU reaches this container: it was started without GPUs, or its host has none"
        fix = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
        yield Problem(what, fix)
    elif facts.driver is None:
        what = "there is no NVIDIA driver: no libcuda.so.1, which every CUDA program needs"
        yield Problem(what, INSTALL_DRIVER)
    elif not facts.devices:
        what = "the NVIDIA driver offers no GPU: its kernel module is not loaded, or there is none"
        yield Problem(what, "sudo modprobe nvidia")
    elif facts.cuda_init:
        means, fix = CUDA_INIT.get(facts.cuda_init, ("it does not start", "nvidia-smi -q"))
        yield Problem(f"the NVIDIA driver fails with CUDA error {facts.cuda_init}: {means}", fix)


def torch_problems(facts: Facts) -> Iterator[Problem]:
    name, driver = f"torch {facts.torch}", facts.driver
    if facts.torch_cuda is None:
        yield Problem(f"{name} is built without CUDA", torch_command(facts))
    elif driver and driver[0] < facts.torch_cuda[0]:  # it serves every minor version of its own
        what = f"the driver supports CUDA {dotted(driver)}, {name} needs {facts.torch_cuda[0]}.x"
        yield Problem(what, torch_command(facts) if driver >= (12, 0) else INSTALL_DRIVER)
    for gpu in facts.gpus:
        if facts.torch_arches and not serves(facts.torch_arches, gpu.capability):
            what = f"{name} is built for {' '.join(facts.torch_arches)}, not for {gpu.name}"
            yield Problem(f"{what} ({dotted(gpu.capability)})", torch_command(facts))


def serves(arches: list[str], capability: Version) -> bool:
    """Machine code, such as sm_86, serves its own major version from its minor on."""
    versions = [divmod(int(digits), 10) for digits in re.findall(r"sm_(\d+)", " ".join(arches))]
    return any(arch[0] == capability[0] and arch <= capability for arch in versions)


def torch_command(facts: Facts) -> str:
    """Installs a torch for the GPUs and the driver here: for CUDA 13, or 12.6 where one of them is
    older. CUDA 12.6 does not know Blackwell, and torch 2.11 was the last for CUDA 12.8: there the
    driver changes instead.
    """
    needs_12 = (facts.driver or (13, 0)) < (13, 0)
    if needs_12 and any(gpu.capability >= BLACKWELL for gpu in facts.gpus):
        return f"{INSTALL_DRIVER}-open"
    # without force pip is content with the version that is there
    command = "pip install --force-reinstall torch"
    if needs_12 or any(gpu.capability < (7, 5) for gpu in facts.gpus):
        command += " --index-url https://download.pytorch.org/whl/cu126"
    return command


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
    version = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "")
    driver, status = driver_facts()
    return Facts(
        container=any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv"))),
        devices=glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg"),  # dxg: of WSL
        driver=driver,
        cuda_init=status,
        torch=torch.__version__,
        torch_cuda=(int(version[1]), int(version[2])) if version else None,
        torch_arches=torch.cuda.get_arch_list(),
        torch_devices=devices,
        nvcc=asked(lambda: toolchain.find_compiler().path),
        cache=asked(build.cache_directory),
        gpus=[torch_gpu(index) for index in range(devices)] or listed_gpus(),
    )


def asked(find: Callable[[], Path]) -> str:
    """What the builder finds, or why it does not."""
    try:
        return str(find())
    except UserError as error:
        return str(error)


def driver_facts() -> tuple[Version | None, int | None]:
    """The CUDA that the driver supports, and the result of cuInit."""
    supported = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, None
    library.cuDriverGetVersion(ctypes.byref(supported))
    version = (supported.value // 1000, supported.value % 1000 // 10)
    return version, library.cuInit(0)


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


# ------------------------------------------------------------------------- command


def page(facts: Facts, problems: list[Problem]) -> str:
    """What the command prints: the facts, the problems with their fixes, and the verdict."""
    text = [
        f"GPU {index}: {gpu.name}, compute capability {dotted(gpu.capability)}; kernels "
        + ("do not run" if gpu.reason else "run")
        for index, gpu in enumerate(facts.gpus)
    ]
    driver = f"for CUDA {dotted(facts.driver)}" if facts.driver else "none"
    text.append(f"driver: {driver}" + (", in a container" if facts.container else ""))
    text.append(f"torch: {facts.torch}, for {' '.join(facts.torch_arches) or 'no GPU'}")
    text += [wrapped(f"nvcc: {facts.nvcc}"), wrapped(f"cache: {facts.cache}")]
    for problem in problems:
        text += ["", wrapped(f"PROBLEM: {problem.what}"), f"  $ {problem.fix}"]
    verdict = "works here" if facts.works else "will not work here"
    return "\n".join([*text, "", f"The cuda backend {verdict}."])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.doctor", description="Whether the CUDA kernels will work here."
    )
    parser.add_argument("--json", action="store_true", help="facts and problems as JSON")
    options = parser.parse_args(arguments)
    facts = gather()
    problems = judge(facts)
    if options.json:
        answer = {"works": facts.works, "facts": asdict(facts)}
        answer["problems"] = [problem._asdict() for problem in problems]
        print(json.dumps(answer, indent=2))
    else:
        print(page(facts, problems))
    sys.exit(0 if facts.works else 1)


if __name__ == "__main__":
    run_command(main)
