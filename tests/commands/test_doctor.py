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
from mixer.ops import choice

ROOT = Path(doctor.__file__).parents[1]
H200 = doctor.Gpu("NVIDIA H200", (9, 0), None)
V100 = doctor.Gpu("Tesla V100", (7, 0), None)
UNBUILT = dataclasses.replace(H200, reason="no `such thing`; `build it`")
UNSEEN = doctor.Gpu("NVIDIA H200", (9, 0))
HEALTHY = doctor.Facts(
    container=False, devices=["/dev/nvidia0"], driver=(13, 0), cuda_init=0, torch="2.13.0+cu130",
    torch_cuda=(13, 0), torch_arches=["sm_75", "sm_80", "sm_90"], torch_devices=1,
    nvcc="/cuda/bin/nvcc", cache="/home/me/kernels", gpus=[H200],
)  # fmt: skip
BLIND = dict(torch_devices=0, gpus=[])  # torch sees nothing
CPU_TORCH = BLIND | dict(torch="2.13.0+cpu", torch_cuda=None, torch_arches=[])
NO_DRIVER = dict(devices=[], driver=None, cuda_init=None)
NO_NVCC = "the CUDA kernels need nvcc. Install it with `pip install nvidia-cuda-nvcc`."


def fake(**changes) -> doctor.Facts:
    return dataclasses.replace(HEALTHY, **changes)


BROKEN = {
    "container without --gpus": (BLIND | NO_DRIVER | dict(container=True), "docker run --gpus all"),
    "container without the driver's library": (
        BLIND | dict(container=True, driver=None), "NVIDIA_DRIVER_CAPABILITIES=compute",
    ),
    "no driver": (BLIND | NO_DRIVER, "apt-get install -y nvidia-driver-580"),
    "module not loaded": (BLIND | dict(devices=[]), "modprobe nvidia"),
    "GPUs hidden": (BLIND | dict(cuda_init=100, gpus=[UNSEEN]), "unset CUDA_VISIBLE_DEVICES"),
    "fabric manager down": (BLIND | dict(cuda_init=802), "systemctl start nvidia-fabricmanager"),
    "driver half updated": (BLIND | dict(cuda_init=803), "reboot"),
    "driver fails": (BLIND | dict(cuda_init=999), "nvidia-smi"),
    "nothing explains it": (BLIND, "torch.utils.collect_env"),
    "CPU-only torch": (CPU_TORCH | dict(gpus=[UNSEEN]), r"pip install --force-reinstall torch$"),
    "CPU-only torch, V100": (
        CPU_TORCH | dict(gpus=[dataclasses.replace(UNSEEN, capability=(7, 0))]), "/whl/cu126$",
    ),
    "driver too old for torch": (
        BLIND | dict(driver=(12, 4), gpus=[UNSEEN]),
        "pip install --force-reinstall torch .*/whl/cu126$",
    ),
    "driver too old for torch on Blackwell": (
        BLIND | dict(driver=(12, 8), torch_arches=["sm_90", "sm_100"],
                     gpus=[dataclasses.replace(UNSEEN, capability=(10, 0))]),
        "apt-get install -y nvidia-driver-580-server-open$",
    ),
    "driver too old for any torch": (
        BLIND | dict(driver=(11, 4)), "apt-get install -y nvidia-driver-580",
    ),
    "torch without sm_70": (
        dict(gpus=[dataclasses.replace(V100, reason="no kernel image")]), "/whl/cu126$",
    ),
    "no nvcc": (dict(gpus=[dataclasses.replace(H200, reason=NO_NVCC)]), "^pip install nvidia-cuda"),
    "the kernels fail": (dict(gpus=[UNBUILT] * 8), "^build it$"),
    "a message without a command": (
        dict(gpus=[dataclasses.replace(H200, reason="lost")]), "^python -m mixer.ops.build$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes, expected", BROKEN.values(), ids=BROKEN)
def test_broken_environment_has_one_problem_with_its_fix(changes, expected):
    (problem,) = doctor.judge(fake(**changes))
    assert re.search(expected, problem.fix), problem
    text = doctor.page(fake(**changes), [problem])
    assert f"PROBLEM: {problem.what}" in " ".join(text.split())
    assert f"\n  $ {problem.fix}\n" in text
    assert text.endswith("The cuda backend will not work here.")


def test_no_failure_goes_without_a_problem():
    choices = itertools.product(
        [[], [UNSEEN], [UNBUILT], [H200, UNBUILT]], [0, 1], [None, 0, 100, 802],
        [None, (12, 4), (13, 0)], [None, (12, 6), (13, 0)], [True, False],
    )  # fmt: skip
    for gpus, devices, init, driver, torch_cuda, container in choices:
        facts = fake(
            gpus=gpus, torch_devices=devices, cuda_init=init, driver=driver, torch_cuda=torch_cuda,
            container=container,
        )  # fmt: skip
        problems = doctor.judge(facts)
        assert bool(problems) != facts.works, facts
        assert all(problem.what and problem.fix for problem in problems)


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("echo '7.0, Tesla V100'; echo '[N/A], odd'", [("Tesla V100", (7, 0))]),
        ("echo nonsense; exit 3", []),
        (None, []),
    ],
)
def test_gpus_are_listed_where_torch_sees_none(tmp_path, monkeypatch, printed, found):
    if printed:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{printed}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [(gpu.name, gpu.capability) for gpu in doctor.listed_gpus()] == found


def test_a_gpu_that_has_stopped_answering_is_a_fact(monkeypatch):
    def lost(index):
        raise RuntimeError("CUDA error: the GPU is lost")

    monkeypatch.setattr(choice, "device_reason", lost)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert doctor.torch_gpu(0).reason == "CUDA error: the GPU is lost"


def test_command_agrees_with_the_backend(tmp_path):
    """Also where others can write to the cache, which is a fact like any other."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    command = [sys.executable, "-m", "mixer.doctor", "--json"]
    environment = os.environ | {"MIXER_CACHE": str(tmp_path)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    answer = json.loads(result.stdout)
    assert (result.returncode, result.stderr, answer["works"]) == (1, "", False)
    assert answer["facts"]["torch"] == torch.__version__ and answer["problems"]
    assert f"`chmod 700 {tmp_path}/kernels`" in answer["facts"]["cache"]


def test_status_is_0_where_the_backend_works(monkeypatch, capsys):
    """Whatever else is missing."""
    facts = fake(nvcc=NO_NVCC)
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    with pytest.raises(SystemExit) as status:
        doctor.main([])
    assert status.value.code == 0
    said = capsys.readouterr().out
    assert "The cuda backend works here." in said and "PROBLEM" not in said
