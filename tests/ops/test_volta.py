"""The kernels for V100, without one: their source runs on the CPU, and CUDA 12.2 compiles it for
sm_70.
"""

import ctypes
import itertools
import re
import subprocess

import nvrtc
import pytest
import torch
from ptx_library import PtxLibrary
from tensor_emulator import sources
from toolchain import first_and_slow, kernels_of, needs_nvcc

from mixer.ops import build, cuda

KERNELS = ["volta_forward.cu", "volta_grad_input.cu", "volta_grad_weight.cu"]
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
    """Random shapes, heads, taps, strides, types of bias and gradient, with and without bias and
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


together = pytest.mark.xdist_group("sm_70")  # on one worker, which compiles once


@pytest.fixture(scope="module")
def compiled_for_sm_70():
    """Machine code and log of each source that a library for sm_70 has kernels of."""
    return {path.stem: nvrtc.compile_source(path, "sm_70") for path in nvrtc.sources()}


@nvrtc.needs_nvrtc
@together
def test_all_kernels_compile_for_sm_70_without_spills(compiled_for_sm_70):
    for name, (code, log) in compiled_for_sm_70.items():
        kernels = kernels_of(log)
        assert code.startswith(b"\x7fELF") and kernels, f"{name}: {log}"
        assert [kernel for kernel in kernels if kernel.spilled_bytes] == []


@nvrtc.needs_nvrtc
@needs_nvcc
@together
def test_every_instance_is_compiled_for_sm_70(compiled_for_sm_70, kernel_cache):
    """Each type of x, of weight and gradient, for one tap and several, finds its kernels by the
    names that the driver knows.
    """
    names = {
        stem: [kernel.name for kernel in kernels_of(log)]
        for stem, (_, log) in compiled_for_sm_70.items()
    }
    library = PtxLibrary(cuda.load(str(build.library((9, 0)))), names, lambda *launch: 0)
    for dtype, other, taps in itertools.product(
        cuda.DTYPE_CODES.values(), cuda.DTYPE_CODES.values(), (1, 3)
    ):
        params = cuda.Params(
            batch=2,
            tokens=129,
            channels=64,
            context=140,
            heads=2,
            taps=taps,
            columns=136,
            dtype=dtype,
            weight_dtype=other,
            gradient_dtype=other,
            dbias=16,
            capability=70,
            processors=80,
        )
        is_served = dtype == cuda.DTYPE_CODES[torch.float16]
        for function in ("pack", "forward", "grad_input", "grad_weight")[: 4 if is_served else 1]:
            assert getattr(library, f"mixer_{function}")(ctypes.byref(params)) == 0
    # not for Volta; and generation's, which tests/ops/test_mix_row.py runs
    others = ("ampere", "mix_row")
    kernels = {name for stem in names for name in names[stem] if not stem.startswith(others)}
    left = kernels - library.launched  # of types that Ampere's kernels leave to it
    assert left and all(re.search("grad_bias_kernelI(f|13__nv_bfloat16)", name) for name in left)


@nvrtc.needs_nvrtc
def test_ptx_is_of_cuda_12(tmp_path):
    ptx, _ = nvrtc.compile_source(build.SOURCES / "volta_forward.cu", "compute_70")
    assert (
        re.search(rb"\.version 8\.\d+\s+\.target sm_70", ptx)
        and b"mma.sync.aligned.m8n8k4.row.row" in ptx
    )
