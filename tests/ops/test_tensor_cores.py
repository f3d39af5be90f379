"""The kernels for Volta and Ampere without a GPU: their own source runs on the CPU, and CUDA 12.2
compiles Volta's for sm_70.
"""

import nvrtc
import pytest
from emulated_cases import run_cases
from emulator import sources
from toolchain import first_and_slow, needs_nvcc, spills_of

from mixer.ops import build

CAPABILITIES = {"volta": 70, "ampere": 80}
ARRIVED = (
    "      wait_copies<kStages - 2>();\n      __syncthreads();  // every thread's copies for the "
    "next step have arrived\n"
)
WAIT, BARRIER = ARRIVED.splitlines(keepends=True)
# In the set of an architecture: what is wrong, and how the source says it.
MISTAKES = {
    ("volta", "a stage is overwritten while it is read"): (
        "      __syncthreads();  // this step's slices",
        "      // this step's slices",
    ),
    ("ampere", "slices are read before they have arrived"): (ARRIVED, BARRIER),
    ("volta", "two quad pairs take the same columns"): (": lane / 8 % 2;", ": lane / 4 % 2;"),
    ("ampere", "a stage is filled while it is read"): (ARRIVED, WAIT),
}


def run(architecture: str, directory, *mistake, status: int = 0) -> None:
    """Random shapes, strides, full weights and lags, types of x and gradients, sizes of GPU."""
    library = sources.tensor_library(architecture, directory, *mistake)
    arguments = (CAPABILITIES[architecture], 1, 45, "any", 0, 450)
    run_cases(library, directory / "printed", *arguments, status=status)


@needs_nvcc
@pytest.mark.parametrize("architecture", CAPABILITIES)
def test_kernels_are_right_on_the_cpu(architecture, tmp_path):
    run(architecture, tmp_path)


@needs_nvcc
@pytest.mark.parametrize("mistake", first_and_slow(MISTAKES), ids=": ".join)
def test_mistakes_are_seen_on_the_cpu(mistake, tmp_path):
    run(mistake[0], tmp_path, MISTAKES[mistake], status=1)


@nvrtc.needs_nvrtc
@pytest.mark.parametrize("name", ["volta.cu", "mix_row.cu"])
def test_kernels_compile_for_sm_70_without_spills(name):
    code, log = nvrtc.compile_source(build.SOURCES / name, "sm_70")
    spills = {name: bytes for name, bytes in spills_of(log).items() if "bfloat16" not in name}
    assert code.startswith(b"\x7fELF") and spills, log
    assert not any(spills.values()), spills
