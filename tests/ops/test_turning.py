"""Norm and rotation of queries and keys: plain PyTorch and the Triton kernels."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import turning_cases

from mixer.ops.turning import turn

ROOT = Path(__file__).parents[2]


def test_a_turned_head_has_length_one_and_products_know_distances_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 16, dtype=torch.float64).expand(2, 1, 40, 16)
    angle = torch.arange(40)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    rotation = angle.cos()[None].double(), angle.sin()[None].double()
    query, key = (turn(x, heads=2, rotation=rotation) for x in (query, key))
    torch.testing.assert_close(key.square().mean(-1), torch.ones(1, 40).double(), rtol=1e-4, atol=0)
    products = query[0, :, :8] @ key[0, :, :8].T
    for distance in (-3, 0, 5):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-5)


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
