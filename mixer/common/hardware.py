"""What the device can do, and what was used of it: its peak for the metrics, its memory, and
whether it has bf16.
"""

import resource
import sys

import torch

from mixer.common.errors import UserError

# Dense tensor-core peaks in TFLOP/s by the vendors' data sheets, keyed by (part of the device's
# name, precision).
PEAK_TFLOPS = {
    "H200": {"bf16": 989.0, "fp16": 989.0},
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0},
    "H100": {"bf16": 989.0, "fp16": 989.0},
    "A100": {"bf16": 312.0, "fp16": 312.0},
    "V100-PCIE": {"fp16": 112.0},
    "V100": {"fp16": 125.0},
}


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's peak for `precision` ("bf16", "fp16", "no"), or None where it is not known:
    never a guess.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for (
        part,
        peaks,
    ) in PEAK_TFLOPS.items():  # in this order: the longer name before the one it holds
        if part in name:
            return peaks.get(precision)
    return None


def peak_memory_gb(device: torch.device) -> float:
    """Units of 2^30 bytes: the most that PyTorch has allocated on the GPU, or on a CPU that the
    whole process has held.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def check_precision(device: torch.device, precision: str) -> None:
    """Raises UserError for a mixed precision that the device does not have."""
    if precision == "fp16" and device.type == "cpu":
        raise UserError(
            "train.mixed_precision = 'fp16' on a CPU; allowed there: no, bf16; set train.mixed_precision=no"
        )
    if (
        precision == "bf16"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"train.mixed_precision = 'bf16', but {name} has no bf16 arithmetic (it begins with compute capability 8.0); "
            "set train.mixed_precision=fp16"
        )
