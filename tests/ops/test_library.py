"""The built library as Python loads it: its functions and structures."""

import ctypes
import shutil
import subprocess

import pytest
from toolchain import needs_nvcc

from mixer.ops import build, cuda


@pytest.fixture(autouse=True)
def cache(kernel_cache):
    return kernel_cache


@needs_nvcc
def test_library_loads_without_a_gpu():
    library = cuda.load(str(build.library((9, 0))))
    assert library.mixer_params_size() == ctypes.sizeof(cuda.Params)
    assert b"driver" in library.mixer_error_string(35)


@needs_nvcc
@pytest.mark.parametrize("capability", [70, 80, 90])
def test_the_gradient_of_lags_needs_no_square_of_the_context(capability):
    library = cuda.load(str(build.library((9, 0))))
    params = cuda.Params(batch=1, tokens=1 << 17, context=1 << 17, channels=512, heads=1)
    params.columns, params.lag_zero, params.dtype = (1 << 17) + 128, 1 << 17, 1
    params.capability, params.processors = capability, 132
    assert 0 < library.mixer_grad_weight_workspace(ctypes.byref(params)) < 32 << 20


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
