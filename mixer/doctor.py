"""Whether the CUDA kernels will work here, and if not, what to do: `python -m mixer.doctor`.

Kernels that are not built yet are built and tried: only running them shows that they run. Status 0
if backend `cuda` will work, else 1.
"""

import os
import re
import sys
import warnings

import torch

from mixer.common.errors import command_parser, run_command
from mixer.ops import cuda
from mixer.ops.build import dotted
from mixer.reporting.tables import wrapped

# CUDA 12.6 is the last whose torch has V100, and driver 580 the last that knows a V100.
INSTALL_TORCH = "pip install --force-reinstall torch"  # without force pip keeps what is there
INSTALL_TORCH_12 = f"{INSTALL_TORCH} --index-url https://download.pytorch.org/whl/cu126"
INSTALL_DRIVER = "sudo apt-get install -y nvidia-driver-580-server"
START_CONTAINER = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."

Problem = tuple[str, str]  # what is wrong, and one command that mends it


def blindness(error: str, in_container: bool) -> Problem:
    """Why torch sees no GPU. error: what torch says when it starts CUDA."""
    fix = "nvidia-smi"  # which says what the driver sees
    if "not compiled with CUDA" in error:
        fix = INSTALL_TORCH
    elif "no NVIDIA driver" in error:
        fix = START_CONTAINER if in_container else INSTALL_DRIVER
    elif found := re.search(r"too old \(found version (\d+)\)", error):
        fix = INSTALL_TORCH_12 if int(found[1]) >= 12000 else INSTALL_DRIVER
    return f"torch {torch.__version__} sees no GPU: {' '.join(error.split())}", fix


def gpu_problem(name: str, capability: tuple[int, int], reason: str | None) -> Problem | None:
    """What keeps a GPU from running the kernels, if anything does. reason: what the kernels' own
    test says.
    """
    if reason is None:
        return None
    arches = torch.cuda.get_arch_list()  # what torch is built for, such as sm_90
    built = [divmod(int(digits), 10) for digits in re.findall(r"sm_(\d+)", " ".join(arches))]
    # Machine code serves its own major version from its minor on.
    if not any((capability[0], 0) <= arch <= capability for arch in built):
        what = f"torch {torch.__version__} is built for {' '.join(arches)}, not for {name}"
        return f"{what} ({dotted(capability)})", INSTALL_TORCH_12
    commands = re.findall(r"`([^`\n]+)`", reason)  # the builder's advice comes last
    fix = commands[-1] if commands else "python -m mixer.ops.build"
    return f"the kernels do not run on {name}: {reason}", fix


def start_cuda() -> str:
    """What torch says when it starts CUDA; empty where it sees a GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says the same
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return ""


def gpu_reason(index: int) -> str | None:
    try:
        return cuda.device_reason(index)
    except Exception as error:  # whatever a broken GPU makes of it is what we came for
        return str(error)


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("mixer.doctor", "Whether the CUDA kernels will work here.")
    parser.parse_args(arguments)
    problems = []
    print(f"torch: {torch.__version__}")
    if error := start_cuda():
        in_container = any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
        problems = [blindness(error, in_container)]
    for index in range(0 if error else torch.cuda.device_count()):
        gpu = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        problem = gpu_problem(*gpu, gpu_reason(index))
        state = "do not run" if problem else "run"
        print(f"GPU {index}: {gpu[0]}, compute capability {dotted(gpu[1])}; kernels {state}")
        problems += [problem] if problem and problem not in problems else []
    for what, fix in problems:
        print(f"\n{wrapped(f'PROBLEM: {what}')}\n  $ {fix}")
    print(f"\nThe cuda backend {'will not work' if problems else 'works'} here.")
    if problems:
        print("Models run all the same: model.mixing_backend=auto then uses plain PyTorch.")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    run_command(main)
