"""The Triton kernels of the norm and rotation of queries and keys, against plain PyTorch."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import turning_cases

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
def test_kernels_are_right_on_the_cpu():
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, turning_cases.__file__], env=environment, check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("size", [16, 64, 128])
def test_kernels_are_right_on_a_gpu(size):
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    turning_cases.check_all("cuda", dtypes, batch=3, tokens=200, size=size)
