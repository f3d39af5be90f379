"""What keeps the CUDA kernels from working here, and a command that mends it.

Kernels are built if none are there, and compared with plain PyTorch: only running them shows that
they are right.
"""

import os
import re
import warnings

import torch

from mixer.ops import build, selftest

# CUDA 12.6 is the last whose torch has V100, and driver 580 the last that knows a V100.
INSTALL_TORCH = "pip install --force-reinstall torch"  # without force pip keeps what is there
INSTALL_TORCH_12 = f"{INSTALL_TORCH} --index-url https://download.pytorch.org/whl/cu126"
INSTALL_DRIVER = "sudo apt-get install -y nvidia-driver-580-server"
START_CONTAINER = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
# What torch says where it sees no GPU, and the command that mends it; the first that fits.
REMEDIES = {
    "not compiled with CUDA": INSTALL_TORCH,
    r"too old \(found version 1[2-9]": INSTALL_TORCH_12,
    "too old": INSTALL_DRIVER,
    "no NVIDIA driver": INSTALL_DRIVER,
    "": "nvidia-smi",  # which says what the driver sees
}


def blindness() -> tuple[str, str] | None:
    """Why torch sees no GPU, if it sees none, and one command that fixes it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says the same
            torch.cuda.init()
        return None
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
    fix = next(fix for sign, fix in REMEDIES.items() if re.search(sign, reason))
    is_in_container = any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
    if is_in_container and "no NVIDIA driver" in reason:
        fix = START_CONTAINER
    return f"torch {torch.__version__} sees no GPU: {reason}", fix


def gpu_problem(index: int, name: str, capability: tuple[int, int]) -> tuple[str, str] | None:
    """What keeps a GPU from running the kernels, if anything does, and a command that fixes it."""
    try:
        reason = selftest.fault(index)
    except Exception as error:  # whatever a broken GPU makes of it is what we came for
        reason = str(error)
    if reason is None:
        return None
    arches = torch.cuda.get_arch_list()  # what torch is built for, such as sm_90
    built_for = [divmod(int(digits), 10) for digits in re.findall(r"sm_(\d+)", " ".join(arches))]
    # Machine code serves its own major version from its minor on.
    if not any((capability[0], 0) <= built <= capability for built in built_for):
        problem = f"torch {torch.__version__} is built for {' '.join(arches)}, not for {name}"
        return f"{problem} ({build.dotted(capability)})", INSTALL_TORCH_12
    # The builder's advice comes last in what it says.
    commands = ["python -m mixer.ops.build", *re.findall(r"`([^`\n]+)`", reason)]
    return f"the kernels do not run on {name}: {reason}", commands[-1]
