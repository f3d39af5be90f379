"""The device: GPU or CPU, throughput, memory, precisions, and what a measurement was made with."""

import errno
import os
import resource
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from torch.utils import collect_env

from mixer.common.errors import UserError, warn

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # by --dtype
PRECISIONS = TYPES | {"no": torch.float32}  # by train.mixed_precision
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
# Dense tensor-core peaks of 16-bit types in TFLOP/s, from the vendors' data sheets, by a model that
# the device's name contains. The first one counts, so a longer name is before the one it holds.
PEAK_TFLOPS = {
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "V100S": 130.0,
    "V100-PCIE": 112.0,
    "V100": 125.0,
}


def sees_gpu() -> bool:
    """Whether PyTorch sees a GPU to compute on. Warns where it does not and there should be one, as
    a CPU takes far longer.
    """
    if torch.cuda.is_available():
        return True
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    blind = f"on the CPU, as torch {torch.__version__} sees no GPU, though"
    if visible is None and NVIDIA_DRIVER.exists():
        warn(f"{blind} there is a driver for one: ask `mixer doctor`")
    elif visible not in (None, "", "-1"):  # the last two hide the GPUs from this process
        remedy = "name GPUs that `nvidia-smi -L` lists, none twice, or ask `mixer doctor`"
        warn(f"{blind} CUDA_VISIBLE_DEVICES is {visible}: {remedy}")
    return False


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's peak for `precision` ("bf16", "fp16" or "no"); None if it is not known."""
    if device.type != "cuda" or precision == "no":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for model, peak in PEAK_TFLOPS.items() if model in name), None)


def peak_memory_gb(device: torch.device) -> float:
    """The most memory used so far, in units of 2^30 bytes: by PyTorch on a GPU, by the whole
    process on a CPU.
    """
    if device.type == "cuda":
        # Not max_memory_allocated, which leaves out what a CUDA graph keeps between its replays.
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def memory_limit(device: torch.device) -> int:
    """The bytes of memory that there are: the GPU's, or the machine's or the container's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [psutil.virtual_memory().total]
    for group in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups, versions 2 and 1
        with suppress(OSError, ValueError):  # there is none, or it says max
            limits.append(int(Path("/sys/fs/cgroup", group).read_text()))
    return min(limits)


def lacks_bf16(device: torch.device) -> str:
    """The name of a GPU without bf16 arithmetic; "" for any other device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0):
        return ""
    return torch.cuda.get_device_name(device)


# What PyTorch's allocators for GPUs and CPUs, the CUDA driver and cuBLAS say.
NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the host had too little memory."""
    if isinstance(error, RuntimeError):
        return any(sign in str(error) for sign in NO_MEMORY)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError)


def out_of_memory(device: torch.device, activity: str, sizes: str, remedy: str) -> UserError:
    """The error for people, to be made where memory has just run out.

    activity: as in "evaluating FILE"; sizes: what decides how much memory that takes; remedy: what
    to lower.
    """
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "the host's memory"
    limit = memory_limit(device) / 2**30
    return UserError(
        f"out of memory on {device} ({name}, {limit:.1f} GiB) while {activity}: the peak was "
        f"{peak_memory_gb(device):.2f} GiB. Sizes: {sizes}. {remedy}"
    )


@contextmanager
def memory_for(device: torch.device, activity: str, sizes: str, remedy: str) -> Iterator[None]:
    """Raises `out_of_memory` where what is done inside runs out of it."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(device, activity, sizes, remedy) from None


# The root of the checkout, or the directory that the package is installed into.
ROOT = Path(__file__).resolve().parents[2]


def hardware(device: str = "cuda") -> dict:
    """The GPU's name and the versions of driver, CUDA and torch; on a CPU torch's alone."""
    if device == "cpu" or not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__}
    return {
        "device": torch.cuda.get_device_name(),
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) or "unknown",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def commit() -> str:
    """The hash of the checkout's commit, or "unknown" if this code is not in its own checkout."""
    if not (ROOT / ".git").exists():  # perhaps one that the package is installed inside of
        return "unknown"
    # By the shell, which survives a machine without git.
    _, output, _ = collect_env.run(f"git -C {shlex.quote(str(ROOT))} rev-parse HEAD")
    return output or "unknown"
