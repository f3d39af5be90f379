"""Where a measurement comes from: the hardware, the driver and library versions, and the commit."""

import subprocess
from pathlib import Path

import torch

# The root of the checkout, or the directory that the package is installed into.
ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "unknown"


def hardware(device: str = "cuda") -> dict:
    """The GPU's name and the versions of driver, CUDA and torch.

    For `device` "cpu", or on a machine without a GPU: "cpu" and the version of torch.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__}
    return {
        "device": torch.cuda.get_device_name(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def in_words(hardware: dict) -> str:
    """What `hardware` has found, for reports."""
    return ", ".join(f"{key} {value}" for key, value in hardware.items())


def commit() -> str:
    """The hash of the checkout's commit, or "unknown" if this code is not in its own checkout."""
    is_ours = (ROOT / ".git").exists()  # not one that the package is installed inside of
    return _first_line("git", "rev-parse", "HEAD") if is_ours else UNKNOWN


def _first_line(*command: str) -> str:
    """The first line that a program prints, or "unknown" if it fails or is not installed: a missing
    tool must not lose a measurement.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return done.stdout.partition("\n")[0]
