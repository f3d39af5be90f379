"""The kernels for Ampere without a GPU: their own source runs on the CPU."""

import pytest
from emulated_cases import run_cases
from emulator import sources
from toolchain import first_and_slow, needs_nvcc


@needs_nvcc
def test_kernels_are_right_on_the_cpu(tmp_path):
    """Random shapes, strides, full weights and lags, types of x and gradients, sizes of GPU."""
    library = sources.tensor_library("ampere", tmp_path)
    result = run_cases(library, 80, 1, 45, "any", 0, 450)
    assert result.returncode == 0, result.stdout[-300:] + result.stderr[-500:]


ARRIVED = (
    "      wait_copies<kStages - 2>();\n      __syncthreads();  // every thread's copies for the "
    "next step have arrived\n"
)
WAIT, BARRIER = ARRIVED.splitlines(keepends=True)
MISTAKES = {
    "slices are read before they have arrived": (ARRIVED, BARRIER),
    "a stage is filled while it is read": (ARRIVED, WAIT),
}


@needs_nvcc
@pytest.mark.parametrize("mistake", first_and_slow(MISTAKES))
def test_mistakes_are_seen_on_the_cpu(mistake, tmp_path):
    wrong = sources.tensor_library("ampere", tmp_path, MISTAKES[mistake])
    assert run_cases(wrong, 80, 1, 45, "any", 0, 450).returncode == 1
