"""The prebuilt kernels, of `make wheel` here or of an installed wheel (`make test-wheel`)."""

import ctypes
import json
import re
import subprocess
import sys

import pytest
import torch

from mixer.ops import build, cuda

if not build.PREBUILT.exists():
    pytest.skip("no prebuilt kernels here: make wheel", allow_module_level=True)

GPUS = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
PACK = re.compile(rb"\x50\xed\x55\xba\x01\0\x10\0.{8}", re.DOTALL)  # as fatbinary begins one

FIRST_CALL = """
import json, time, torch
from mixer import triangular_conv
from mixer.ops import build

def passes(x, weight, bias, backend):
    x, weight, bias = (value.detach().requires_grad_() for value in (x, weight, bias))
    y = triangular_conv(x, weight, bias, backend=backend)
    (y * y).sum().backward()
    return [value.detach().double().cpu() for value in (y, x.grad, weight.grad, bias.grad)]

torch.manual_seed(0)
x = torch.randn(4, 512, 256, device="cuda", dtype=torch.float16)
weight = torch.randn(2, 1, 512, 512, device="cuda") / 512**0.5
bias = torch.randn(2, 512, device="cuda")
torch.cuda.synchronize()  # CUDA itself has started
start = time.perf_counter()
ours = passes(x, weight, bias, "cuda")
seconds = time.perf_counter() - start
exact = passes(x.double(), weight.double(), bias.double(), "dense")
errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact)]
library = build.library(torch.cuda.get_device_capability())
print(json.dumps({"seconds": seconds, "errors": errors, "library": str(library)}))
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def machine_code(library: bytes) -> list[tuple[int, int]]:
    """The GPU (such as 90) and the format's version of each file of machine code."""
    found = []
    for pack in PACK.finditer(library):
        header = library[pack.end() :]
        elf = header[int.from_bytes(header[4:8], "little") :]
        if elf.startswith(b"\x7fELF"):
            found.append((header[28], elf[8]))
    return found


@pytest.mark.parametrize("capability", GPUS, ids=build.dotted)
def test_there_is_machine_code_for_a_gpu_that_drivers_of_cuda_12_load(capability):
    major, minor = capability
    code = machine_code(build.prebuilt_library(capability).read_bytes())
    assert len(code) == len(list(build.SOURCES.glob("*.cu"))) - (0 if major == 9 else 2)
    for gpu, version in code:
        assert gpu // 10 == major and gpu % 10 <= minor
        assert version == (7 if major < 10 else 8)  # CUDA 12.9's; that of CUDA 13 is 8 for all


@pytest.mark.parametrize("capability", GPUS, ids=build.dotted)
def test_a_library_loads_and_says_what_is_missing(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    library = cuda.load_library.__wrapped__(0)
    assert b"driver" in library.mixer_error_string(35)
    params = cuda.Params(batch=1, tokens=512, context=512, channels=512, heads=1, columns=512)
    params.dtype = 1
    params.capability = 10 * capability[0] + capability[1]
    params.processors = 132
    assert library.mixer_grad_weight_workspace(ctypes.byref(params)) >= 0
    if not torch.cuda.is_available():
        status = library.mixer_forward(ctypes.byref(params))
        assert b"driver" in library.mixer_error_string(status)


def test_the_libraries_are_small():
    sizes = [path.stat().st_size for path in build.PREBUILT.glob(f"*/{build.LIBRARY}")]
    assert len(sizes) == 5 and sum(sizes) < 20e6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_first_call_takes_less_than_a_second_without_nvcc_and_is_right(
    empty_cache, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    command = [sys.executable, "-c", FIRST_CALL]
    how = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=tmp_path, **how)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    first = json.loads(done.stdout)
    assert first["library"].startswith(str(build.PREBUILT))
    assert not list(empty_cache.rglob(build.LIBRARY))
    assert max(first["errors"]) < 2e-3
    assert first["seconds"] < 1
