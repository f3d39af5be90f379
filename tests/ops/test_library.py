"""The built library as Python loads it: its functions and structures, and why it cannot run."""

import ctypes
import shutil
import subprocess

import pytest
from toolchain import needs_nvcc

from mixer.ops import build, choice, cuda


@pytest.fixture(autouse=True)
def cache(kernel_cache):
    return kernel_cache


@needs_nvcc
def test_library_loads_without_a_gpu():
    library = cuda.load(str(build.library((9, 0))))
    assert library.mixer_params_size() == ctypes.sizeof(cuda.Params)
    assert library.mixer_abi_version() == cuda.ABI_VERSION
    assert b"driver" in library.mixer_error_string(35)


@needs_nvcc
def test_workspace_grows_until_the_gpu_is_full():
    library = cuda.load(str(build.library((9, 0))))

    def workspace(tokens: int, batch: int) -> int:
        params = cuda.Params(
            batch=batch,
            tokens=tokens,
            channels=1024,
            context=tokens,
            heads=1,
            taps=1,
            columns=tokens,
            dtype=2,
            capability=80,
            processors=132,
        )
        return library.mixer_grad_weight_workspace(ctypes.byref(params))

    tile = 128 * 128 * 4
    assert workspace(64, 0) == 0
    assert workspace(64, 1) == 8 * tile  # the 32 slices of the channels in 8 ranges
    assert workspace(512, 128) == 10 * 26 * tile  # 10 lower tiles; blocks for 132 processors
    assert workspace(8192, 8) == 64 * 65 // 2 * tile  # enough tiles: one split


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_structure_and_c_struct_agree(tmp_path):
    checks = []
    for name, _ in cuda.Params._fields_:
        field = getattr(cuda.Params, name)
        same_place = f"offsetof(TriangularConvParams, {name}) == {field.offset}"
        same_size = f"sizeof(TriangularConvParams::{name}) == {field.size}"
        checks.append(f'static_assert({same_place} && {same_size}, "{name}");')
    size = f'static_assert(sizeof(TriangularConvParams) == {ctypes.sizeof(cuda.Params)}, "size");'
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(["#include <cstddef>", '#include "params.h"', *checks, size]))
    subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", f"-I{build.SOURCES}", str(source)], check=True
    )


def test_driver_older_than_the_build_names_the_toolkit():
    class Library:
        mixer_runtime_version = staticmethod(lambda: 13000)
        mixer_driver_version = staticmethod(lambda: 12040)
        mixer_error_string = staticmethod(
            lambda status: b"CUDA driver version is insufficient for CUDA runtime version"
        )

    message = choice.probe_message(Library(), 35, "NVIDIA X")
    assert "built with CUDA 13.0, and the driver supports 12.4." in message
    assert "`CUDA_HOME=/usr/local/cuda-12 python -m mixer.ops.build`" in message
