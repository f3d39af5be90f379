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

import pytest
import torch

from mixer import doctor
from mixer.ops import choice, diagnosis

ROOT = Path(doctor.__file__).parents[1]
H200 = diagnosis.Gpu("NVIDIA H200", (9, 0), None)
V100 = diagnosis.Gpu("Tesla V100", (7, 0), None)
UNBUILT = dataclasses.replace(H200, reason="no `such thing`; `build it`")
UNSEEN = diagnosis.Gpu("NVIDIA H200", (9, 0))
HEALTHY = diagnosis.Facts(
    container=False, devices=["/dev/nvidia0"], driver_library=True, driver_cuda=(13, 0),
    cuda_init=None, visible=None, torch="2.13.0+cu130", torch_cuda=(13, 0),
    torch_arches=["sm_75", "sm_80", "sm_90"], torch_devices=1, nvcc="13.0 (/cuda/bin/nvcc)",
    host_compiler="/usr/bin/g++", cache="/home/me/kernels", missing=[], gpus=[H200],
)  # fmt: skip
BLIND = dict(torch_devices=0, cuda_init=0, gpus=[])  # torch sees nothing
CPU_TORCH = BLIND | dict(torch="2.13.0+cpu", torch_cuda=None, torch_arches=[])
NO_DRIVER = dict(devices=[], driver_library=False, driver_cuda=None, cuda_init=None)
NO_NVCC = "the CUDA kernels need nvcc. Install it with `pip install nvidia-cuda-nvcc`."


def fake(**changes) -> diagnosis.Facts:
    return dataclasses.replace(HEALTHY, **changes)


# ------------------------------------------------------------------------------------------ judging


def test_a_machine_where_the_kernels_run_has_no_problem():
    """Whatever is missing: a library that is built needs none of the tools."""
    assert diagnosis.judge(HEALTHY) == []
    assert "The cuda backend works here." in doctor.page(HEALTHY, [])
    assert diagnosis.judge(fake(nvcc=None, host_compiler=None, missing=[NO_NVCC])) == []


BROKEN = {
    "container without --gpus": (BLIND | NO_DRIVER | dict(container=True), "docker run --gpus all"),
    "container without the driver's library": (
        BLIND | dict(container=True, driver_library=False, driver_cuda=None, cuda_init=None),
        "NVIDIA_DRIVER_CAPABILITIES=compute",
    ),
    "no driver": (BLIND | NO_DRIVER, "apt-get install -y nvidia-driver-580"),
    "module not loaded": (BLIND | dict(devices=[]), "modprobe nvidia"),
    "GPUs hidden": (
        BLIND | dict(visible="", cuda_init=100, gpus=[UNSEEN]), "unset CUDA_VISIBLE_DEVICES",
    ),
    "fabric manager down": (BLIND | dict(cuda_init=802), "systemctl start nvidia-fabricmanager"),
    "driver half updated": (BLIND | dict(cuda_init=803), "reboot"),
    "driver fails": (BLIND | dict(cuda_init=999), "nvidia-smi"),
    "nothing explains it": (BLIND, "torch.utils.collect_env"),
    "CPU-only torch": (CPU_TORCH | dict(gpus=[UNSEEN]), r"pip install --force-reinstall torch$"),
    "CPU-only torch, V100": (
        CPU_TORCH | dict(gpus=[dataclasses.replace(UNSEEN, capability=(7, 0))]), "/whl/cu126$",
    ),
    "driver too old for torch": (
        BLIND | dict(driver_cuda=(12, 4), gpus=[UNSEEN]),
        "pip install --force-reinstall torch .*/whl/cu126$",
    ),
    "driver too old for torch, on Blackwell": (
        BLIND | dict(torch_arches=["sm_100"], driver_cuda=(12, 8),
            gpus=[dataclasses.replace(UNSEEN, capability=(10, 0))]),
        "pip install --force-reinstall torch .*/whl/cu128$",
    ),
    "driver too old for any torch": (
        BLIND | dict(driver_cuda=(11, 4)), "apt-get install -y nvidia-driver-580",
    ),
    "torch without sm_70": (
        dict(gpus=[dataclasses.replace(V100, reason="no kernel image")]), "/whl/cu126$",
    ),
    "no nvcc": (
        dict(nvcc=None, missing=[NO_NVCC], gpus=[dataclasses.replace(H200, reason=NO_NVCC)]),
        "^pip install nvidia-cuda-nvcc$",
    ),
    "the kernels fail": (dict(gpus=[UNBUILT] * 8), "^build it$"),
    "a message without a command": (
        dict(gpus=[dataclasses.replace(H200, reason="lost")]), "^python -m mixer.ops.build$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes, expected", BROKEN.values(), ids=BROKEN)
def test_broken_environment_has_one_problem_with_its_fix(changes, expected):
    (problem,) = diagnosis.judge(fake(**changes))
    assert re.search(expected, problem.fix), problem
    text = doctor.page(fake(**changes), [problem])
    assert f"PROBLEM: {problem.what}" in " ".join(text.split())
    assert f"\n  $ {problem.fix}\n" in text
    assert text.endswith("The cuda backend will not work here.")


def test_no_failure_goes_without_a_problem():
    choices = itertools.product(
        [[], [UNSEEN], [UNBUILT], [H200, UNBUILT]], [0, 1], [None, 0, 100, 802], [True, False],
        [None, (12, 4), (13, 0)], [None, (12, 6), (13, 0)], [[], [NO_NVCC]], [True, False],
    )  # fmt: skip
    for gpus, devices, init, library, driver, torch_cuda, missing, container in choices:
        facts = fake(
            gpus=gpus, torch_devices=devices, cuda_init=init, driver_library=library,
            driver_cuda=driver, torch_cuda=torch_cuda, missing=missing, container=container,
        )  # fmt: skip
        problems = diagnosis.judge(facts)
        assert bool(problems) != facts.works, facts
        assert all(problem.what and problem.fix for problem in problems)


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


# ---------------------------------------------------------------------------------------- gathering


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        (
            "echo '7.0, Tesla V100-SXM2-32GB'; echo '[N/A], odd'",
            [("Tesla V100-SXM2-32GB", (7, 0))],
        ),
        ("echo nonsense; exit 3", []),
        (None, []),
    ],
)
def test_gpus_are_listed_where_torch_sees_none(tmp_path, monkeypatch, printed, found):
    if printed:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{printed}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [(gpu.name, gpu.capability) for gpu in diagnosis.listed_gpus()] == found


def test_driver_is_asked_for_its_cuda(monkeypatch):
    class Library:
        def cuDriverGetVersion(self, version):
            version._obj.value = 12040
            return 0

        def cuInit(self, flags):
            return 802

    monkeypatch.setattr(diagnosis.ctypes, "CDLL", lambda name: Library())
    expected = dict(driver_library=True, driver_cuda=(12, 4))
    assert diagnosis.driver_facts(initialise=True) == expected | {"cuda_init": 802}
    assert diagnosis.driver_facts(initialise=False) == expected | {"cuda_init": None}


def test_a_gpu_that_has_stopped_answering_is_a_fact(monkeypatch):
    def lost(index):
        raise RuntimeError("CUDA error: the GPU is lost")

    monkeypatch.setattr(choice, "device_reason", lost)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert diagnosis.torch_gpu(0).reason == "CUDA error: the GPU is lost"


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
def test_json_has_facts_and_problems_and_what_the_builder_says_is_one(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(SystemExit) as status:
        doctor.main(["--json"])
    answer = json.loads(capsys.readouterr().out)
    assert status.value.code == 1 and answer["works"] is False
    assert answer["facts"]["torch"] == torch.__version__ and answer["facts"]["cache"] is None
    assert f"chmod 700 {tmp_path}/kernels" in [problem["fix"] for problem in answer["problems"]]


def test_status_is_0_where_the_backend_works(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gather", lambda: HEALTHY)
    with pytest.raises(SystemExit) as status:
        doctor.main([])
    assert status.value.code == 0 and "works here" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_command_agrees_with_the_backend():
    command = [sys.executable, "-m", "mixer.doctor"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in result.stderr
    assert (result.returncode == 0) is (choice.device_reason(0) is None), result.stdout
