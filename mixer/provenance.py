"""Where a measurement comes from: the hardware, its software, and the commit."""

import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def hardware() -> dict:
    if not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "unknown"
