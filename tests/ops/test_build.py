"""Building the CUDA kernels: needs nvcc for the tests that compile, a GPU for none of them."""

import ctypes
import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import start_python
from toolchain import kernels_of, needs_nvcc

from mixer.common.errors import UserError
from mixer.ops import build, toolchain

ROOT = Path(build.__file__).parents[2]
TINY = (
    'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    "__global__ void kernel(float* x) { *x = 1; }\n"
)


@pytest.fixture(autouse=True)
def cache(kernel_cache):
    return kernel_cache


@pytest.fixture
def tiny(tmp_path):
    """A csrc with one small file, which builds in two seconds; unique, so that no other test's
    build is a hit.
    """
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.cu").write_text(f"// {tmp_path}\n{TINY}")
    return folder


def fake_nvcc(
    home: Path, version: str = "13.0", architectures: str = "75 80 90 100", compiles: str = "exit 1"
) -> Path:
    """A CUDA_HOME whose nvcc answers questions as the real one does."""
    listing = "; ".join(f"echo compute_{architecture}" for architecture in architectures.split())
    path = home / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        f'--version) echo "Cuda compilation tools, release {version}, V{version}.1";;\n'
        f"--list-gpu-arch) {listing};;\n"
        f"*) {compiles};;\nesac\n"
    )
    path.chmod(0o755)
    return home


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
def test_kernels_compile_for_hopper_without_spills():
    assert_whole_without_spills((build.library((9, 0)).parent / build.LOG).read_text(), hopper=18)


@needs_nvcc
@pytest.mark.parametrize("source", ("ampere_grad_input", "ampere_grad_weight"))
def test_tensor_core_kernels_compile_for_8_0_without_spills(source, tmp_path):
    """A product and the weight gradient; `make soak` compiles the whole library."""
    compiler = toolchain.find_compiler()
    flags = [*build.COMPILE_FLAGS, *toolchain.architecture_flags(compiler, (8, 0))]
    unit = [str(build.SOURCES / f"{source}.cu"), "-c", "-o", str(tmp_path / "unit.o")]
    done = subprocess.run(
        [str(compiler.path), *flags, *unit], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    kernels = kernels_of(done.stdout.decode())
    assert kernels and [kernel for kernel in kernels if kernel.spilled_bytes] == []


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ((8, 0), (7, 5)), ids=("8.0", "7.5"))
def test_kernels_compile_for_older_gpus_without_spills(architecture, tmp_path):
    """8.6 and 8.9 get the same PTX as 8.0, and as many registers."""
    compiler = toolchain.find_compiler()
    flags = [*build.COMPILE_FLAGS, *toolchain.architecture_flags(compiler, architecture)]
    build.build(tmp_path / "library", build.SOURCES, compiler, flags)
    log = (tmp_path / "library" / build.LOG).read_text()
    assert f"for 'sm_{architecture[0]}{architecture[1]}'" in log
    assert_whole_without_spills(log)


def assert_whole_without_spills(log: str, hopper: int = 0) -> None:
    kernels = kernels_of(log)
    # forward and grad_input for each type, Volta's for fp16, for one tap and for several; on Hopper
    # in three sizes, forward with and without a residual
    for family, products in {"volta": 4, "ampere": 12, "hopper": hopper}.items():
        found = [
            kernel
            for kernel in kernels
            if "product_kernel" in kernel.name and family in kernel.name
        ]
        assert len(found) == products, family
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []


@needs_nvcc
def test_hopper_gets_its_own_instructions():
    log = (build.library((9, 0)).parent / build.LOG).read_text()
    assert "for 'sm_90a'" in log
    # ptxas says so where it had to wait for each
    assert "wgmma.mma_async instructions are serialized" not in log


@needs_nvcc
def test_second_build_is_a_cache_hit(capfd):
    first = build.library((9, 0))
    changed = first.stat().st_mtime_ns
    capfd.readouterr()
    assert build.library((9, 0)) == first
    assert first.stat().st_mtime_ns == changed
    assert "building" not in capfd.readouterr().err


@needs_nvcc
def test_changed_source_builds_anew(tiny):
    first = build.library((8, 0), tiny)
    (tiny / "tiny.cu").write_text(TINY.replace("42", "43"))
    second = build.library((8, 0), tiny)
    assert first != second
    assert (ctypes.CDLL(str(first)).answer(), ctypes.CDLL(str(second)).answer()) == (42, 43)


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
    name = build.source_name((8, 0), tiny)
    deadline = time.monotonic() + 30
    while not list(cache.glob(f"{name}-*.tmp")):  # in mid-build
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.005)
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
    assert list(cache.glob(f"{name}-*.tmp")) == []


@needs_nvcc
def test_compiler_error_is_quoted_and_its_log_kept(tmp_path, cache):
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, sources)
    for path in sources.glob("*.cu"):
        if path.name != "pack.cu":
            path.unlink()
    with open(sources / "pack.cu", "a") as file:
        file.write("\nint broken() { return undeclared_thing; }\n")
    with pytest.raises(toolchain.BuildError, match="undeclared_thing") as failure:
        build.library((8, 0), sources)
    log = str(failure.value).partition("The whole log: ")[2].splitlines()[0]
    assert "undeclared_thing" in Path(log).read_text()
    assert list(cache.glob(f"{build.source_name((8, 0), sources)}*.tmp")) == []


@needs_nvcc
def test_gpu_newer_than_nvcc_gets_ptx():
    compiler = toolchain.find_compiler()
    newest = compiler.architectures[-1]
    assert toolchain.architecture_flags(compiler, (99, 0)) == [
        f"-gencode=arch=compute_{newest},code=compute_{newest}"
    ]


@needs_nvcc
def test_library_found_without_nvcc(tiny, monkeypatch):
    path = build.library((8, 0), tiny)
    monkeypatch.setattr(toolchain, "nvcc_candidates", lambda: iter([]))
    assert build.library((8, 0), tiny) == path


def test_a_library_is_found_without_nvcc_only_when_it_is_whole(tiny, cache, tmp_path, monkeypatch):
    """Not while another machine builds it in a shared cache, nor where its builder was killed."""
    slow = tmp_path / "slow"
    slow.touch()
    half = f'case "$out" in *.so) while test -e "{slow}"; do sleep 0.01; done;; esac'
    home = fake_nvcc(tmp_path / "cuda", compiles=f'for out; do :; done; echo half > "$out"; {half}')

    def assert_none_is_found() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(toolchain, "nvcc_candidates", lambda: iter([]))
            with pytest.raises(toolchain.BuildError, match="need nvcc"):
                build.library((8, 0), tiny)

    process = builder(tiny, tmp_path / "printed", CUDA_HOME=str(home))
    try:
        deadline = time.monotonic() + 30
        while not list(cache.glob(f"{build.source_name((8, 0), tiny)}-*/{build.LIBRARY}")):
            assert time.monotonic() < deadline and process.is_alive()
            time.sleep(0.005)
        assert_none_is_found()
        process.kill()
        process.join()
        assert_none_is_found()
    finally:
        slow.unlink()  # ends the compiler too
        process.kill()
        process.join()
    monkeypatch.setenv("CUDA_HOME", str(home))
    whole = build.library((8, 0), tiny)
    shutil.copytree(whole.parent, whole.parent.with_suffix(".abc.tmp"))  # of one killed later
    monkeypatch.setattr(toolchain, "nvcc_candidates", lambda: iter([]))
    assert build.library((8, 0), tiny) == whole


@needs_nvcc
def test_command_line_prints_a_report(cache):
    build.library((9, 0))
    result = subprocess.run(
        [sys.executable, "-m", "mixer.ops.build", "--arch", "9.0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "nvcc" in result.stdout and "build.log" in result.stdout and str(cache) in result.stdout
    assert "Warning" not in result.stderr


# ------------------------------------------------------------------------- messages


def test_missing_nvcc_says_how_to_install_it(tiny, monkeypatch):
    monkeypatch.setattr(toolchain, "nvcc_candidates", lambda: iter([Path("/nonexistent/nvcc")]))
    with pytest.raises(UserError, match="pip install nvidia-cuda-nvcc"):
        build.library((9, 0), tiny)


def test_cuda_home_comes_before_path(tmp_path, monkeypatch):
    home = fake_nvcc(tmp_path / "cuda", version="12.4", architectures="50 70 90")
    monkeypatch.setenv("CUDA_HOME", str(home))
    compiler = toolchain.find_compiler()
    assert compiler == toolchain.Compiler(home / "bin" / "nvcc", (12, 4), (50, 70, 90))
    assert toolchain.architecture_flags(compiler, (7, 0)) == ["-gencode=arch=compute_70,code=sm_70"]
    assert toolchain.architecture_flags(compiler, (9, 0)) == [
        "-DMIXER_HOPPER",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    assert toolchain.architecture_flags(compiler, (8, 6)) == [
        "-gencode=arch=compute_70,code=compute_70"
    ]


@pytest.mark.parametrize("folder", ["cu13", "cuda_nvcc"])
def test_nvcc_of_a_wheel_is_found(folder, tmp_path, monkeypatch):
    """Where no variable names another and none is in PATH; CUDA 13's wheels have one folder for
    all, those before one each.
    """
    home = fake_nvcc(tmp_path / folder)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    wheels = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(
        toolchain.importlib.util, "find_spec", lambda name: wheels if name == "nvidia" else None
    )
    assert toolchain.find_compiler().path == home / "bin" / "nvcc"


def test_nvcc_behind_a_link_is_called_where_its_toolkit_is(tmp_path, monkeypatch):
    """Called by a link, such as one in /usr/local/bin, it does not find its own headers."""
    home = fake_nvcc(tmp_path / "cuda-13.0")
    (tmp_path / "local" / "bin").mkdir(parents=True)
    (tmp_path / "local" / "bin" / "nvcc").symlink_to(home / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "local"))
    assert toolchain.find_compiler().path == home / "bin" / "nvcc"


def test_nvcc_that_is_a_link_to_ccache_is_called_by_its_own_name(tmp_path, monkeypatch):
    ccache = fake_nvcc(tmp_path / "cache").rename(tmp_path / "ccache-home") / "bin" / "nvcc"
    real = ccache.rename(ccache.with_name("ccache"))
    real.write_text(f'#!/bin/sh\n[ "${{0##*/}}" = nvcc ] || exit 1\n{real.read_text()}')
    (tmp_path / "masquerade" / "bin").mkdir(parents=True)
    nvcc = tmp_path / "masquerade" / "bin" / "nvcc"
    nvcc.symlink_to(real)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "masquerade"))
    assert toolchain.find_compiler().path == nvcc


def test_a_file_system_without_locks_builds(tiny, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    home = fake_nvcc(tmp_path / "cuda", compiles='for out; do :; done; echo whole > "$out"')
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert build.library((8, 0), tiny).read_text() == "whole\n"


def test_a_toolkit_in_a_directory_of_any_name_builds(tiny, tmp_path, monkeypatch):
    """nvcc is called there, and finds its runtime."""
    finds = 'for out; do case "$out" in -L*) found=$(ls "${out#-L}");; esac; done'
    home = fake_nvcc(
        tmp_path / "Ann's $HOME: CUDA 13 (new)", compiles=f'{finds}; echo "$found" > "$out"'
    )
    (home / "lib").mkdir()
    (home / "lib" / "libcudart_static.a").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert build.library((8, 0), tiny).read_text() == "libcudart_static.a\n"


def test_volta_under_cuda_13_names_cuda_12(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "cuda")))
    with pytest.raises(
        UserError, match=r"13\.0 .*no longer compiles for compute capability 7\.0(.|\n)*CUDA 12"
    ):
        build.library((7, 0))


def test_too_old_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "cuda", "12.4", "50 60 70")))
    with pytest.raises(UserError, match="7.0 or newer; this GPU has 6.1"):
        build.library((6, 1))


def test_known_failure_names_its_mend(tiny, tmp_path, monkeypatch):
    home = fake_nvcc(
        tmp_path / "cuda",
        compiles="echo '#error -- unsupported GNU version! gcc versions later than 13' >&2; exit 1",
    )
    monkeypatch.setenv("CUDA_HOME", str(home))
    with pytest.raises(UserError, match="NVCC_PREPEND_FLAGS"):
        build.library((9, 0), tiny)


def test_cache_is_private(cache):
    assert stat.S_IMODE(build.cache_directory().stat().st_mode) == 0o700


def test_cache_that_cannot_be_written_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="MIXER_CACHE"):
        build.cache_directory()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_cache_that_others_can_write_is_refused(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path))
    directory = build.cache_directory()
    directory.chmod(mode)
    with pytest.raises(
        UserError,
        match=rf"mode {mode:04o}.*loaded from there as code.*`chmod 700 {directory}`.*MIXER_CACHE",
    ):
        build.cache_directory()
    directory.chmod(0o700)
    assert build.cache_directory() == directory


def test_cache_that_others_can_read_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path))
    build.cache_directory().chmod(0o755)
    assert build.cache_directory() == tmp_path / "kernels"


def test_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path))
    owner = build.cache_directory().stat().st_uid
    monkeypatch.setattr(build.os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        UserError, match=rf"belongs to user {owner}; you are user {owner + 1}.*`export MIXER_CACHE="
    ):
        build.cache_directory()


@pytest.mark.parametrize("with_nvcc", [True, False])
def test_library_left_by_others_is_not_loaded(with_nvcc, tiny, tmp_path, monkeypatch):
    """It may lie there since the cache was open to all; the cache itself is closed by now."""
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "cuda")))
    compiler = toolchain.find_compiler()
    flags = [*build.COMPILE_FLAGS, *toolchain.architecture_flags(compiler, (8, 0))]
    planted = build.cache_directory() / build.build_name((8, 0), tiny, compiler, flags)
    if not with_nvcc:
        monkeypatch.setattr(toolchain, "nvcc_candidates", lambda: iter([]))
    planted.mkdir()
    (planted / build.LIBRARY).write_bytes(b"")
    planted.chmod(0o777)
    with pytest.raises(UserError, match=rf"others can write to {planted}"):
        build.library((8, 0), tiny)


def test_home_that_cannot_be_written_names_the_variable(monkeypatch):
    for variable in ("MIXER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/proc")  # even root makes no directory there
    with pytest.raises(
        UserError, match=r"cannot write to /proc/.cache/mixer/kernels .*`export MIXER_CACHE="
    ):
        build.cache_directory()


def test_user_without_home_needs_only_the_variable(tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path))
    assert build.cache_directory() == tmp_path / "kernels"
    monkeypatch.delenv("MIXER_CACHE")
    with pytest.raises(UserError, match="no home.*`export MIXER_CACHE="):
        build.cache_directory()
