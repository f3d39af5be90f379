"""The doctor: faked environments are judged, and the real command runs on this machine. Needs no
GPU.
"""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mixer import doctor
from mixer.ops import build, diagnosis, machine, toolchain

ROOT = Path(doctor.__file__).parents[1]
NVCC_13 = toolchain.Compiler(Path("/cuda/bin/nvcc"), (13, 0), (75, 80, 90, 100))
NVCC_12 = toolchain.Compiler(Path("/cuda/bin/nvcc"), (12, 9), (50, 70, 75, 80, 90, 100))
H200 = diagnosis.Gpu("NVIDIA H200", (9, 0), (138.0, 139.8), "/cache/lib.so", True, None)
V100 = diagnosis.Gpu("Tesla V100", (7, 0), (31.0, 31.7), "/cache/lib.so", True, None)
UNBUILT = dataclasses.replace(H200, library=None, loads=False, reason="no; `build it`")
UNSEEN = diagnosis.Gpu("NVIDIA H200", (9, 0), (138.0, 139.8))
CACHE = diagnosis.Cache("/home/me/kernels", 0o700, 1000)
HEALTHY = diagnosis.Facts(
    user=1000, container=False, devices=["/dev/nvidia0"],
    driver_library=True, driver="580.65.06", driver_cuda=(13, 0),
    cuda_init=None, visible=None, torch="2.13.0+cu130", torch_cuda=(13, 0),
    torch_arches=["sm_75", "sm_80", "sm_90"],
    torch_devices=1, nccl="2.28.3", nvcc=NVCC_13, nvcc_error=None, toolkits={},
    ninja="1.13.0 (ninja)",
    host_compiler="g++ 12.2.0", cache=CACHE, gpus=[H200],
)  # fmt: skip
BLIND = dict(torch_devices=0, cuda_init=0, gpus=[])  # torch sees nothing
CPU_TORCH = BLIND | dict(torch="2.13.0+cpu", torch_cuda=None, torch_arches=[])
NO_DRIVER = dict(devices=[], driver_library=False, driver=None, driver_cuda=None, cuda_init=None)
TOOLKITS = {
    "12.4": "/usr/local/cuda-12.4",
    "12.9": "/usr/local/cuda-12.9",
    "13.0": "/usr/local/cuda-13.0",
}
V100_ON_13 = dataclasses.replace(V100, library=None, loads=False, reason="no longer compiles")


def fake(**changes) -> diagnosis.Facts:
    return dataclasses.replace(HEALTHY, **changes)


def blocking(facts: diagnosis.Facts) -> dict[str, str]:
    """Keys and fixes of what keeps the backend from working."""
    return {problem.key: problem.fix for problem in diagnosis.judge(facts) if problem.blocks}


def notes(facts: diagnosis.Facts) -> dict[str, str]:
    return {problem.key: problem.fix for problem in diagnosis.judge(facts) if not problem.blocks}


# ------------------------------------------------------------------------------------------ judging


def test_healthy_machine_has_no_problem():
    assert diagnosis.judge(HEALTHY) == []
    assert "The cuda backend works here." in doctor.page(HEALTHY, [])


BROKEN = {
    "container without --gpus": (BLIND | NO_DRIVER | dict(container=True),
        {"container": "docker run --gpus all"}),
    "container without the driver's library": (
        BLIND | dict(container=True, driver_library=False, driver_cuda=None, cuda_init=None),
        {"no-driver": "NVIDIA_DRIVER_CAPABILITIES=compute"},
    ),
    "no driver": (BLIND | NO_DRIVER, {"no-driver": "apt-get install -y nvidia-driver-580"}),
    "module not loaded": (BLIND | dict(devices=[]), {"no-device": "modprobe nvidia"}),
    "GPUs hidden": (BLIND | dict(visible="", cuda_init=100, gpus=[UNSEEN]),
        {"hidden": "unset CUDA_VISIBLE_DEVICES"}),
    "fabric manager down": (BLIND | dict(cuda_init=802),
        {"driver-broken": "systemctl start nvidia-fabricmanager"}),
    "driver half updated": (BLIND | dict(cuda_init=803), {"driver-broken": "reboot"}),
    "driver fails": (BLIND | dict(cuda_init=999), {"driver-broken": "nvidia-smi"}),
    "nothing explains it": (BLIND, {"no-gpu": "torch.utils.collect_env"}),
    "CPU-only torch": (CPU_TORCH | dict(gpus=[UNSEEN]),
        {"torch-cpu": r"pip install --force-reinstall torch$"}),
    "CPU-only torch, V100": (
        CPU_TORCH | dict(nvcc=NVCC_12, gpus=[dataclasses.replace(UNSEEN, capability=(7, 0))]),
        {"torch-cpu": "/whl/cu126$"},
    ),
    "driver too old for torch": (
        BLIND | dict(driver_cuda=(12, 4), nvcc=NVCC_12, gpus=[UNSEEN]),
        {"driver-old": "pip install --force-reinstall torch .*/whl/cu126$"},
    ),
    "driver too old for torch, on Blackwell": (
        BLIND | dict(torch_arches=["sm_100"], driver_cuda=(12, 8), nvcc=NVCC_12,
            gpus=[dataclasses.replace(UNSEEN, capability=(10, 0))]),
        {"driver-old": "pip install --force-reinstall torch .*/whl/cu128$"},
    ),
    "driver too old for any torch": (
        BLIND | dict(driver_cuda=(11, 4), nvcc=None, toolkits={"11.8": "/usr/local/cuda-11.8"}),
        {"driver-old": "apt-get install -y nvidia-driver-580",
            "no-nvcc": "CUDA_HOME=/usr/local/cuda-11.8"},
    ),
    "torch without sm_70": (dict(gpus=[V100], nvcc=NVCC_12), {"torch-arch": "/whl/cu126$"}),
    "nvcc 13 on a V100": (
        dict(gpus=[V100_ON_13], torch_arches=["sm_70"], torch_cuda=(12, 6)),
        {"nvcc-arch": "cuda-toolkit-12-9 && export CUDA_HOME=/usr/local/cuda-12.9$"},
    ),
    "nvcc 13 on a V100, an older one beside it": (
        dict(gpus=[V100_ON_13], torch_arches=["sm_70"], torch_cuda=(12, 6), toolkits=TOOLKITS),
        {"nvcc-arch": "^export CUDA_HOME=/usr/local/cuda-12.9$"},
    ),
    "GPU older than the kernels": (
        dict(gpus=[dataclasses.replace(V100_ON_13, capability=(6, 1))], torch_arches=["sm_60"],
            torch_cuda=(12, 6), nvcc=NVCC_12),
        {"gpu-old": "model.mixing_backend=dense"},
    ),
    "nvcc newer than the driver": (
        dict(driver_cuda=(12, 4), torch_cuda=(12, 6), gpus=[UNBUILT], toolkits=TOOLKITS),
        {"nvcc-driver": "^export CUDA_HOME=/usr/local/cuda-12.9$"},
    ),
    "no nvcc": (dict(nvcc=None, gpus=[UNBUILT]), {"no-nvcc": "^pip install nvidia-cuda-nvcc "}),
    "no nvcc in PATH, a toolkit on the disk": (
        dict(nvcc=None, gpus=[UNBUILT], toolkits=TOOLKITS),
        {"no-nvcc": "^export CUDA_HOME=/usr/local/cuda-13.0$"},
    ),
    "no ninja": (dict(ninja=None, gpus=[UNBUILT]), {"no-ninja": "pip install ninja"}),
    "no host compiler": (dict(host_compiler=None, gpus=[UNBUILT]),
        {"no-host-compiler": r"apt-get install -y g\+\+"}),
    "cache of another": (dict(cache=dataclasses.replace(CACHE, owner=0)),
        {"cache-owner": "^export MIXER_CACHE="}),
    "cache open to others": (
        dict(cache=dataclasses.replace(CACHE, mode=0o775)),
        {"cache-shared": "^chmod 700 /home/me/kernels$"},
    ),
    "cache closed": (dict(cache=diagnosis.Cache("/ro", error="cannot write")),
        {"cache-closed": "^export MIXER_CACHE="}),
    "someone builds": (
        dict(cache=dataclasses.replace(CACHE, builders={"/a.lock": [4711]}), gpus=[UNBUILT]),
        {"building": "^kill 4711$"},
    ),
    "someone out of sight builds": (
        dict(cache=dataclasses.replace(CACHE, builders={"/a.lock": []}), gpus=[UNBUILT]),
        {"building": "^fuser -v /a.lock$"},
    ),
    "the probe failed": (
        dict(gpus=[dataclasses.replace(H200, reason="text `first` and `the fix`.")]),
        {"kernels": "^the fix$"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes, expected", BROKEN.values(), ids=BROKEN)
def test_broken_environment_names_its_cause_and_fix(changes, expected):
    found = blocking(fake(**changes))
    assert list(found) == list(expected)
    for key, pattern in expected.items():
        assert re.search(pattern, found[key]), found[key]


def test_what_works_is_only_noted():
    """A library that is built needs none of the tools, and brings its own CUDA runtime."""
    tools = fake(nvcc=None, ninja=None, host_compiler=None)
    assert blocking(tools) == {} and set(notes(tools)) == {
        "no-nvcc",
        "no-ninja",
        "no-host-compiler",
    }
    majors = fake(nvcc=NVCC_12, toolkits=TOOLKITS)
    assert blocking(majors) == {} and notes(majors) == {
        "nvcc-torch": "export CUDA_HOME=/usr/local/cuda-13.0"
    }
    building = fake(cache=dataclasses.replace(CACHE, builders={"/other.lock": [1]}))
    assert blocking(building) == {} and set(notes(building)) == {"building"}


def test_no_failure_goes_without_a_problem():
    """The exit status is 0 only where every GPU ran the kernels: whatever else is found, a GPU that
    did not blocks.
    """
    choices = itertools.product(
        [[], [UNSEEN], [UNBUILT], [V100_ON_13],
         [H200, dataclasses.replace(H200, reason="probe failed")]],
        [0, 1], [None, 0, 100, 802], [True, False],
        [None, (12, 4), (13, 0)], [None, (12, 6), (13, 0)],
        [None, NVCC_12, NVCC_13], [True, False],
    )  # fmt: skip
    for gpus, devices, init, library, driver, torch_cuda, nvcc, container in choices:
        facts = fake(
            gpus=gpus, torch_devices=devices, cuda_init=init, driver_library=library,
            driver_cuda=driver,
            torch_cuda=torch_cuda, nvcc=nvcc, container=container,
        )  # fmt: skip
        assert blocking(facts), facts
        assert all(
            problem.what and problem.means is not None and problem.fix
            for problem in diagnosis.judge(facts)
        )


def test_equal_gpus_have_one_problem():
    assert [problem.key for problem in diagnosis.judge(fake(gpus=[UNBUILT] * 8))] == ["kernels"]


@pytest.mark.parametrize(
    "arches, capability, expected",
    [
        (["sm_70"], (7, 0), True),
        (["sm_75", "sm_80"], (7, 0), False),
        (["sm_80"], (8, 6), True),  # the same major, newer minor
        (["sm_86"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["compute_80"], (9, 0), True),  # PTX is compiled by the driver
        (["compute_90"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),  # an "a" serves its own GPU alone
        (["sm_100f"], (10, 3), True),
    ],
)
def test_architectures_that_serve_a_gpu(arches, capability, expected):
    assert diagnosis.serves(arches, capability) is expected


def test_page_tells_the_fix_below_each_problem():
    facts = fake(gpus=[UNBUILT], ninja=None)
    text = doctor.page(facts, diagnosis.judge(facts))
    assert "PROBLEM: there is no ninja\n" in text and "\n  $ pip install ninja\n" in text
    assert "NVIDIA H200, compute capability 9.0, 138.0 of 139.8 GiB free; kernels not built" in text
    assert text.endswith("The cuda backend will not work here.")
    assert len(text.splitlines()) < 50


# ---------------------------------------------------------------------------------------- gathering


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path / "cache"))
    return build.cache_directory()


def test_missing_tools_are_facts(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(toolchain, "nvcc_candidates", lambda: iter([]))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    facts = machine.tool_facts()
    assert (facts["nvcc"], facts["ninja"], facts["host_compiler"]) == (None, None, None)
    assert "there is none" in facts["nvcc_error"]
    assert machine.listed_gpus() == []


def test_broken_tools_are_facts(tmp_path, monkeypatch):
    for name in ("nvcc", "g++", "nvidia-smi"):
        script(tmp_path / name, "echo nonsense; exit 3")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "nvcc_candidates", lambda: iter([tmp_path / "nvcc"]))
    facts = machine.tool_facts()
    assert facts["nvcc"] is None and "does not run" in facts["nvcc_error"]
    assert facts["host_compiler"] is None
    assert machine.listed_gpus() == []


def test_host_compiler_is_the_one_that_nvcc_is_told(tmp_path, monkeypatch):
    path = script(tmp_path / "g++-12", "echo 'g++ (Fake) 12.9'")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", f"-ccbin {path}")
    assert machine.tool_facts()["host_compiler"] == f"g++ (Fake) 12.9 ({path})"


def test_gpus_are_listed_where_torch_sees_none(tmp_path, monkeypatch):
    script(
        tmp_path / "nvidia-smi",
        "echo '7.0, 31744, 32510, Tesla V100-SXM2-32GB'; echo '[N/A], 1, 2, odd'",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    (gpu,) = machine.gpu_facts(0, CACHE)
    assert (gpu.name, gpu.capability, gpu.memory) == ("Tesla V100-SXM2-32GB", (7, 0), (31.0, 31.7))
    assert gpu.library is None and gpu.reason


def test_driver_is_asked_for_its_cuda(monkeypatch):
    class Library:
        def cuDriverGetVersion(self, version):
            version._obj.value = 12040
            return 0

        def cuInit(self, flags):
            return 802

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Library())
    line = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version: gcc 12.2.0"
    )
    monkeypatch.setattr(machine, "read", lambda path: line)
    expected = dict(driver_library=True, driver="580.65.06", driver_cuda=(12, 4))
    assert machine.driver_facts(initialise=True) == expected | {"cuda_init": 802}
    assert machine.driver_facts(initialise=False) == expected | {"cuda_init": None}


@pytest.mark.parametrize(
    "cgroup, expected", [("0::/\n", False), ("12:devices:/kubepods/besteffort/pod1\n", True)]
)
def test_container_is_told_by_its_cgroup(cgroup, expected, monkeypatch):
    monkeypatch.setattr(machine.os.path, "exists", lambda path: False)
    monkeypatch.setattr(machine, "read", lambda path: cgroup)
    assert machine.in_container() is expected


def test_cache_open_to_others_is_found(cache):
    assert machine.cache_facts() == diagnosis.Cache(str(cache), 0o700, os.geteuid())
    cache.chmod(0o777)
    facts = machine.cache_facts()
    assert facts.mode == 0o777 and "others can write" in facts.error
    assert list(blocking(fake(cache=facts, user=os.geteuid()))) == ["cache-shared"]


def test_cache_that_cannot_be_written_is_found(monkeypatch):
    monkeypatch.setenv("MIXER_CACHE", "/proc/mixer")  # even root makes no directory there
    facts = machine.cache_facts()
    assert facts.mode is None
    assert list(blocking(fake(cache=facts))) == ["cache-closed"]


def test_lock_counts_only_while_its_holder_lives(cache):
    lock = cache / "sm90-x.lock"
    code = (
        f"import fcntl, time; f = open({str(lock)!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        try:
            holder.stdout.readline()
            seen = machine.cache_facts().builders
        finally:
            holder.kill()
    assert list(seen) == [str(lock)]
    assert seen[str(lock)] in ([holder.pid], [])  # /proc/locks is not on every machine
    assert lock.exists() and machine.cache_facts().builders == {}


@pytest.fixture
def one_gpu(monkeypatch):
    """torch as it is where it sees one H200."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**37, 2**38))


def test_doctor_does_not_wait_for_another_builder(one_gpu, cache, monkeypatch):
    monkeypatch.setattr(
        machine.cuda, "kernels", lambda index: pytest.fail("would wait for the lock")
    )
    lock = f"{cache}/{build.source_name((9, 0), build.SOURCES)}-0.lock"
    gpu = machine.torch_gpu(0, dataclasses.replace(CACHE, builders={lock: [4711]}))
    assert gpu.library is None and "another process" in gpu.reason


def test_failed_build_is_a_fact(one_gpu, cache, monkeypatch):
    def fail(index):
        raise toolchain.BuildError("nvcc could not; `do this`")

    monkeypatch.setattr(machine.cuda, "kernels", fail)
    gpu = machine.torch_gpu(0, CACHE)
    assert (gpu.library, gpu.loads, gpu.reason) == (None, False, "nvcc could not; `do this`")
    assert blocking(fake(gpus=[gpu])) == {"kernels": "do this"}


def test_probe_of_a_built_library_is_a_fact(one_gpu, cache, monkeypatch):
    library = cache / f"{build.source_name((9, 0), build.SOURCES)}-0" / build.LIBRARY
    library.parent.mkdir()
    library.write_bytes(b"")
    monkeypatch.setattr(machine.cuda, "kernels", lambda index: object())
    for reason in (None, "the kernels do not run"):
        monkeypatch.setattr(machine.choice, "device_reason", lambda index, reason=reason: reason)
        assert machine.gpu_facts(1, CACHE) == [
            diagnosis.Gpu("NVIDIA H200", (9, 0), (128.0, 256.0), str(library), True, reason)
        ]


def test_gpu_that_stops_answering_is_no_crash(monkeypatch):
    def lost(index):
        raise RuntimeError("CUDA error: the GPU is lost")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lost)
    monkeypatch.setattr(machine, "listed_gpus", lambda: [UNSEEN])
    assert [gpu.reason for gpu in machine.gpu_facts(1, CACHE)] == ["CUDA error: the GPU is lost"]


# --------------------------------------------------------------------------------- the real command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_command_without_a_gpu(tmp_path):
    command = [sys.executable, "-m", "mixer.doctor"]
    environment = os.environ | {"MIXER_CACHE": str(tmp_path)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (1, "")
    assert "PROBLEM" in result.stdout and "The cuda backend will not work here." in result.stdout
    assert torch.__version__ in result.stdout and str(tmp_path / "kernels") in result.stdout
    assert ("is built without CUDA" in result.stdout) is (torch.version.cuda is None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_json_has_facts_and_problems(cache, capsys):
    with pytest.raises(SystemExit) as status:
        doctor.main(["--json"])
    answer = json.loads(capsys.readouterr().out)
    assert status.value.code == 1 and answer["works"] is False
    assert answer["facts"]["torch"] == torch.__version__ and answer["facts"]["cache"][
        "path"
    ] == str(cache)
    assert answer["problems"] and all(problem["fix"] for problem in answer["problems"])


def test_status_is_0_where_the_backend_works(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gather", lambda: HEALTHY)
    with pytest.raises(SystemExit) as status:
        doctor.main([])
    assert status.value.code == 0 and "works here" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_command_agrees_with_the_backend():
    result = subprocess.run(
        [sys.executable, "-m", "mixer.doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    reason = machine.choice.device_reason(0)
    assert "Traceback" not in result.stderr
    assert (result.returncode == 0) is (reason is None), result.stdout
