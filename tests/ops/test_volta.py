"""The kernels for V100, without one: their source runs on the CPU, and CUDA 12.2 compiles it for
sm_70.
"""

import nvrtc
import pytest
from emulated_cases import run_cases
from emulator import sources
from toolchain import first_and_slow, kernels_of, needs_nvcc

from mixer.ops import build


@needs_nvcc
def test_kernels_are_right_on_the_cpu(tmp_path):
    """Random shapes, strides, full weights and lags, types of gradients, sizes of GPU."""
    library = sources.tensor_library("volta", tmp_path)
    result = run_cases(library, 70, 1, 36, "any", 0, 450)
    assert result.returncode == 0, result.stdout[-300:] + result.stderr[-500:]


MISTAKES = {
    "a stage is overwritten while it is read": (
        "      __syncthreads();  // this step's slices",
        "      // this step's slices",
    ),
    "two quad pairs take the same columns": (": lane / 8 % 2;", ": lane / 4 % 2;"),
}


@needs_nvcc
@pytest.mark.parametrize("mistake", first_and_slow(MISTAKES))
def test_mistakes_are_seen_on_the_cpu(mistake, tmp_path):
    wrong = sources.tensor_library("volta", tmp_path, MISTAKES[mistake])
    assert run_cases(wrong, 70, 1, 36, "any", 0, 450).returncode == 1


@nvrtc.needs_nvrtc
@pytest.mark.parametrize("name", ["volta.cu", "mix_row.cu"])
def test_kernels_compile_for_sm_70_without_spills(name):
    code, log = nvrtc.compile_source(build.SOURCES / name, "sm_70")
    kernels = [kernel for kernel in kernels_of(log) if "bfloat16" not in kernel.name]
    assert code.startswith(b"\x7fELF") and kernels, log
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []
