"""Where a measurement comes from: the hardware, its software, and the commit."""

import subprocess
from pathlib import Path

import torch

# The checkout; for an installed package, the directory that it is installed into.
ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "unknown"


def hardware(device: str = "cuda") -> dict:
    """What a measurement on `device` ran on; of a machine without a GPU, the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__}
    return {
        "device": torch.cuda.get_device_name(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def commit() -> str:
    """The commit of the checkout that this code is in, "unknown" where it is in none.

    An installed package may lie inside the checkout of another project, whose commit is not ours.
    """
    top = _first_line("git", "rev-parse", "--show-toplevel")
    if top == UNKNOWN or Path(top).resolve() != ROOT:
        return UNKNOWN
    return _first_line("git", "rev-parse", "HEAD")


def _first_line(*command: str) -> str:
    """The first line that a program prints; "unknown" where it fails or is not installed, which is
    no reason to lose a measurement.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return done.stdout.partition("\n")[0]
