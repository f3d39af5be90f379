"""The kernels for V100, without one: their source runs on the CPU, and CUDA 12.2 compiles it for
sm_70.
"""

import subprocess

import nvrtc
import pytest
from tensor_emulator import sources
from toolchain import first_and_slow, kernels_of, needs_nvcc

from mixer.ops import build

KERNELS = ["volta_product.cu", "volta_grad_weight.cu"]
SEEDS = [1, 2]
CASES = 20  # of each seed


# ------------------------------------------------------------------------- on the CPU


def emulated() -> str:
    return sources.emulated(
        build.SOURCES, KERNELS, [(r"asm\(.*?\)\);", "emulator::mma(sum, left, right, layouts);")]
    )


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """The emulator with the kernels as they are."""
    return sources.compiled("volta", emulated(), tmp_path_factory.mktemp("emulator"))


@needs_nvcc
@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_are_right_on_the_cpu(emulator, seed):
    """Random shapes, heads, strides, types of bias and gradient, with and without bias and
    residual.
    """
    result = subprocess.run(
        [str(emulator), str(seed), str(CASES)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, "\n".join(result.stdout.splitlines()[-3:])


MISTAKES = {
    "a stage is overwritten while it is read": (
        "    __syncthreads();  // this step's slices",
        "    // this step's slices",
    ),
    "results overwrite a stage that is read": (
        "  __syncthreads();  // no stage is read any more",
        "",
    ),
    "two quad pairs take the same columns": (": lane() / 8 % 2;", ": lane() / 4 % 2;"),
}


@needs_nvcc
@pytest.mark.parametrize("mistake", first_and_slow(MISTAKES))
def test_mistakes_are_seen_on_the_cpu(mistake, tmp_path):
    text, (old, new) = emulated(), MISTAKES[mistake]
    assert text.count(old) == 1
    wrong = sources.compiled("volta", text.replace(old, new), tmp_path)
    assert subprocess.run([str(wrong), "1", "20"], capture_output=True, timeout=300).returncode == 1


# ------------------------------------------------------------------------- for sm_70


@nvrtc.needs_nvrtc
@pytest.mark.parametrize("name", ["volta_product.cu", "volta_grad_weight.cu", "mix_row.cu"])
def test_kernels_compile_for_sm_70_without_spills(name):
    code, log = nvrtc.compile_source(build.SOURCES / name, "sm_70")
    kernels = [kernel for kernel in kernels_of(log) if "bfloat16" not in kernel.name]
    assert code.startswith(b"\x7fELF") and kernels, log
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []
