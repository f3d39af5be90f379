"""Building the CUDA kernels: needs nvcc for the tests that compile, a GPU for none of them."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import kernel_ladder
import pytest
import torch
from launching import start_python
from toolchain import needs_nvcc, spills_of

from mixer.common.errors import UserError
from mixer.ops import build, cuda

TINY = (
    'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    "__global__ void kernel(float* x) { *x = 1; }\n"
)
WHOLE = 'for out; do :; done; echo whole > "$out"'  # a compiler's work, in shell


@pytest.fixture(autouse=True)
def cache(kernel_cache, monkeypatch):
    monkeypatch.setattr(build, "PREBUILT", kernel_cache / "none")
    return kernel_cache


@pytest.fixture
def tiny(tmp_path):
    """A csrc with one small file, which builds in two seconds; unique, so that no other test's
    build is a hit.
    """
    folder = tmp_path / "c src"
    folder.mkdir()
    (folder / "tiny.cu").write_text(f"// {tmp_path}\n{TINY}")
    return folder


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    """Makes a CUDA_HOME whose nvcc is a line of shell."""

    def make(home: str = "cuda", compiles: str = "exit 1") -> Path:
        path = tmp_path / home / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{compiles}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / home))
        return path

    return make


def builder(sources: Path, output: Path, **environment: str) -> multiprocessing.Process:
    """Another process that asks for the library, in a group of its own."""
    code = (
        "from pathlib import Path; from mixer.ops import build; print(build.library((8, 0), "
        f"Path({str(sources)!r})))"
    )
    program = sources.parent / "builder.py"
    program.write_text(code)
    environment["MIXER_CACHE"] = os.environ["MIXER_CACHE"]
    return start_python(program, output=output, **environment)


# ------------------------------------------------------------------------- real builds


@needs_nvcc
def test_kernels_compile_for_hopper_with_its_own_instructions_and_without_spills():
    log = (build.library((9, 0)).parent / build.LOG).read_text()
    assert_whole_without_spills(log, hopper=18)
    assert "for 'sm_90a'" in log
    # ptxas says so where it had to wait for each
    assert "wgmma.mma_async instructions are serialized" not in log


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ((8, 0), (7, 5)), ids=("8.0", "7.5"))
def test_kernels_compile_for_older_gpus_without_spills(architecture):
    """8.6 and 8.9 get the same PTX as 8.0, and as many registers."""
    assert_whole_without_spills(build.library(architecture).with_name(build.LOG).read_text())


@needs_nvcc
def test_the_ladder_compiles_for_hopper_without_spills(tmp_path):
    """The versions in dev/cuda: each fits its registers, and no wgmma waits for the one before."""
    command = [build.find_nvcc(), "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    command += ["-Xptxas=-v", "-cubin", kernel_ladder.SOURCE, "-o", tmp_path / "ladder.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    log = done.stdout + done.stderr
    spills = spills_of(log)
    for version in ("naive", "shared", "register", "mma", "pipelined", "hopper"):
        assert any(f"{version}_kernel" in name for name in spills), version
    assert not any(spills.values()), spills
    assert "serialized" not in log


def assert_whole_without_spills(log: str, hopper: int = 0) -> None:
    spills = spills_of(log)
    assert not any(spills.values()), spills
    # forward and grad_input for each type, Volta's for fp16; on Hopper in three sizes, forward with
    # and without a residual
    products = [name for name in spills if "product_kernel" in name]
    for family, count in {"volta": 2, "ampere": 4, "hopper": hopper}.items():
        assert sum(family in name for name in products) == count, family


@needs_nvcc
@pytest.mark.parametrize("capability", [70, 80, 90])
def test_a_library_loads_without_a_gpu_and_the_gradient_of_lags_needs_no_square(
    capability, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    library = cuda.load_library.__wrapped__(0)
    assert b"driver" in library.mixer_error_string(35)
    params = cuda.Params(batch=1, tokens=1 << 17, context=1 << 17, channels=512, heads=1)
    params.columns = (1 << 17) + 128
    params.lag_zero = 1 << 17
    params.window = 1 << 17
    params.dtype = 1
    params.capability = capability
    params.processors = 132
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
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{build.SOURCES}", str(source)]
    subprocess.run(command, check=True)


@needs_nvcc
def test_a_library_is_built_once_for_its_sources_and_needs_no_nvcc_then(tiny, monkeypatch):
    first = build.library((8, 0), tiny)
    (tiny / "tiny.cu").write_text(TINY.replace("42", "43"))
    second = build.library((8, 0), tiny)
    assert first != second
    assert (ctypes.CDLL(str(first)).answer(), ctypes.CDLL(str(second)).answer()) == (42, 43)
    monkeypatch.setattr(build.os, "access", lambda path, mode: False)
    assert build.library((8, 0), tiny) == second
    with pytest.raises(UserError, match=r"pip install 'cuda-toolkit\[nvcc,"):
        build.library((9, 0), tiny)


@needs_nvcc
def test_two_builders_at_once_make_one_library(tiny, tmp_path):
    outputs = [tmp_path / "first", tmp_path / "second"]
    processes = [builder(tiny, output) for output in outputs]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    lines = [output.read_text().splitlines() for output in outputs]
    assert lines[0][-1] == lines[1][-1] and Path(lines[0][-1]).name == build.LIBRARY
    assert sum("building" in line for printed in lines for line in printed) == 1


@needs_nvcc
def test_killed_builder_blocks_nobody(tiny, cache, tmp_path):
    process = builder(tiny, tmp_path / "printed")
    name = build.build_name((8, 0), tiny)
    deadline = time.monotonic() + 30
    while not list(cache.glob(f".partial-*{name}")):  # in mid-build
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.005)
    assert not (cache / name).exists()
    process.kill()  # SIGKILL: nothing of it can clean up; its compilers live on
    process.join()
    try:
        path = build.library((8, 0), tiny)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert ctypes.CDLL(str(path)).answer() == 42
    assert list(cache.glob(f"*{name}*")) == [path.parent]
    assert {file.name for file in path.parent.iterdir()} == {build.LIBRARY, build.LOG}


@needs_nvcc
def test_compiler_error_is_quoted_and_leaves_nothing_behind(tiny, cache):
    (tiny / "tiny.cu").write_text(TINY + "int broken() { return undeclared_thing; }\n")
    with pytest.raises(UserError, match="undeclared_thing"):
        build.library((8, 0), tiny)
    assert list(cache.glob(f"*{build.build_name((8, 0), tiny)}*")) == []


# ------------------------------------------------------------------------- nvcc


@needs_nvcc
@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((7, 0), r"compute_70(.|\n)* 7.0 the last is 12.9(.|\n)*`export CUDA_HOME="),
        ((9, 9), "compute_99"),
        ((6, 1), "7.0 or newer; this GPU has 6.1"),
    ],
)
def test_a_gpu_that_nvcc_or_the_kernels_do_not_know_is_named(tiny, capability, message):
    """The nvcc here no longer knows 7.0."""
    with pytest.raises(UserError, match=message):
        build.library(capability, tiny)


def test_nvcc_of_a_wheel_is_found(fake_nvcc, tmp_path, monkeypatch):
    """Where no variable names another and none is in PATH."""
    path = fake_nvcc("cu13")
    assert build.find_nvcc() == path  # CUDA_HOME comes first
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", "")
    wheels = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(
        build.importlib.util, "find_spec", lambda name: wheels if name == "nvidia" else None
    )
    assert build.find_nvcc() == path


@pytest.mark.parametrize(("real", "called"), [("nvcc-13.0", "nvcc-13.0"), ("ccache", "nvcc")])
def test_nvcc_behind_a_link_is_called_by_the_name_that_it_needs(real, called, fake_nvcc):
    """nvcc finds its headers beside its own file; ccache is told by its name what to run."""
    nvcc = fake_nvcc()
    nvcc.symlink_to(nvcc.rename(nvcc.with_name(real)))
    assert build.find_nvcc() == nvcc.with_name(called)


def test_the_runtime_beside_nvcc_is_linked(tiny, fake_nvcc):
    """Which a wheel keeps in lib; the toolkit's directory may have any name."""
    finds = 'for out; do case "$out" in -L*) found=$(ls "${out#-L}");; esac; done'
    nvcc = fake_nvcc("Ann's $HOME: CUDA 13", compiles=f'{finds}; echo "$found" > "$out"')
    (nvcc.parents[1] / "lib").mkdir()
    (nvcc.parents[1] / "lib" / "libcudart_static.a").touch()
    assert build.library((8, 0), tiny).read_text() == "libcudart_static.a\n"


def test_the_command_builds_although_there_is_a_library(fake_nvcc, tmp_path, monkeypatch, capsys):
    """As by a CUDA toolkit that the driver supports. The old library may be in use."""
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path))
    fake_nvcc("cuda-13", compiles=WHOLE)
    path = build.library((8, 0))
    with path.open() as in_use:
        fake_nvcc("cuda-12", compiles=WHOLE.replace("whole", "another"))
        build.main(["--arch", "8.0"])
        assert (path.read_text(), in_use.read()) == ("another\n", "whole\n")
    output = capsys.readouterr().out
    assert str(path) in output and str(path.with_name("build.log")) in output


# ------------------------------------------------------------------------- prebuilt


@pytest.fixture
def prebuilt(tiny, tmp_path, monkeypatch):
    """A library for 8.0 that came with the package, and was built from the tiny sources."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    path = build.PREBUILT / build.build_name((8, 0), tiny) / build.LIBRARY
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_a_prebuilt_library_serves_its_gpus_and_sources_alone(prebuilt, tiny, fake_nvcc):
    """Machine code runs on later minor versions of its GPU; whoever edits the sources builds."""
    fake_nvcc()  # fails
    assert build.library((8, 0), tiny) == build.library((8, 9), tiny) == prebuilt
    with pytest.raises(UserError, match="could not build"):
        build.library((9, 0), tiny)
    (tiny / "tiny.cu").write_text(f"// edited in {tiny}\n{TINY}")
    with pytest.raises(UserError, match="could not build"):
        build.library((8, 0), tiny)


def test_what_the_command_builds_replaces_a_prebuilt_library(prebuilt, tiny, fake_nvcc):
    fake_nvcc(compiles=WHOLE)
    built = build.library((8, 6), tiny, rebuild=True)
    assert build.library((8, 6), tiny) == built != prebuilt
    assert build.library((8, 0), tiny) == prebuilt


def test_a_prebuilt_library_needs_no_cache(prebuilt, tiny, monkeypatch):
    """Such as of a container's user without a home."""
    monkeypatch.setenv("MIXER_CACHE", __file__)
    assert build.library((8, 0), tiny) == prebuilt


# ------------------------------------------------------------------------- cache


def test_a_cache_that_only_its_owner_can_write_is_taken(tmp_path, monkeypatch):
    """A library is loaded from there as code."""
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path))
    directory = build.cache_directory()
    assert directory == tmp_path / "kernels" and directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    assert build.cache_directory() == directory
    for mode in (0o777, 0o770, 0o702):
        directory.chmod(mode)
        with pytest.raises(UserError, match=f"has mode {mode:o}; .*`chmod 700 {directory}`"):
            build.cache_directory()
    directory.chmod(0o700)
    monkeypatch.setattr(build.os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(UserError, match="it must be yours, .*`export MIXER_CACHE="):
        build.cache_directory()


def test_a_library_that_others_could_write_under_any_umask_is_not_made(tiny, fake_nvcc):
    fake_nvcc(compiles=WHOLE)
    before = os.umask(0)
    try:
        path = build.library((8, 0), tiny)
    finally:
        os.umask(before)
    assert path.parent.stat().st_mode & 0o022 == 0


def test_a_cache_that_cannot_be_made_names_the_variable(monkeypatch):
    monkeypatch.setenv("MIXER_CACHE", __file__)
    with pytest.raises(UserError, match="there is no cache .*`export MIXER_CACHE="):
        build.cache_directory()


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch):
    for name in ("MIXER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)  # who is in no list of users
    with pytest.raises(UserError, match="there is no cache .*`export MIXER_CACHE="):
        build.cache_directory()
