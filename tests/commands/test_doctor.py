"""The doctor: what torch and the kernels' test say leads to one command. Needs no GPU."""

import re

import pytest
import torch

from mixer.commands import doctor
from mixer.ops import build, diagnosis, selftest

# As torch words them (c10/cuda/CUDAFunctions.cpp).
BLIND = {
    "Torch not compiled with CUDA enabled": "^pip install --force-reinstall torch$",
    "Found no NVIDIA driver on your system. Please check": "apt-get install -y nvidia-driver-580",
    "The NVIDIA driver on your system is too old (found version 12040). Please": "/whl/cu126$",
    "The NVIDIA driver on your system is too old (found version 11040). Please": "apt-get install",
    "Error 802: system not yet initialized": "^nvidia-smi$",
}
ARCHES = ["sm_75", "sm_80", "sm_90"]
NO_NVCC = "the CUDA kernels need nvcc. Install it with `pip install nvidia-cuda-nvcc`."


@pytest.mark.parametrize("said, fix", BLIND.items())
def test_why_torch_sees_no_gpu_is_said_with_the_command_that_mends_it(monkeypatch, said, fix):
    def refuse():
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(diagnosis.os.path, "exists", lambda _: False)
    what, command = diagnosis.blindness()
    assert said in what and re.search(fix, command)
    monkeypatch.setattr(diagnosis.os.path, "exists", lambda path: path == "/.dockerenv")
    is_for_containers = diagnosis.blindness()[1].startswith("docker run --gpus all")
    assert is_for_containers == ("no NVIDIA driver" in said)


@pytest.mark.parametrize(
    "capability, reason, fix",
    [
        ((9, 0), None, None),
        ((8, 6), None, None),
        ((7, 0), "no kernel image", "/whl/cu126$"),
        ((9, 0), NO_NVCC, "^pip install nvidia-cuda-nvcc$"),
        ((8, 6), "CUDA error: the GPU is lost", "^python -m mixer.ops.build$"),
    ],
)
def test_a_gpu_has_no_problem_or_one_with_its_command(monkeypatch, capsys, capability, reason, fix):
    """Two GPUs of one kind, as torch would show them."""

    def probe(index):
        if reason and "lost" in reason:
            raise RuntimeError(reason)
        return reason

    about = {"init": lambda: None, "device_count": lambda: 2, "get_arch_list": lambda: ARCHES}
    about |= {"get_device_name": lambda _: "a GPU", "get_device_capability": lambda _: capability}
    for name, value in about.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(selftest, "fault", probe)
    with pytest.raises(SystemExit) as status:
        doctor.main([])
    said = capsys.readouterr().out
    commands = re.findall(r"^  \$ (.*)$", said, re.MULTILINE)
    assert status.value.code == len(commands) == (0 if fix is None else 1)
    assert all(re.search(fix, command) for command in commands)
    assert f"backend {'works' if fix is None else 'will not work'} here." in said


def test_prebuilt_kernels_are_told_from_those_built_here(monkeypatch, capsys, tmp_path):
    """Those for 8.0 also run on a GPU of 8.6."""
    library = tmp_path / build.build_name((8, 0), build.SOURCES) / build.LIBRARY
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(selftest, "fault", lambda index: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(8, 6), (9, 0)][index])
    with pytest.raises(SystemExit):
        doctor.main([])
    states = re.findall(r"; (.*kernels.*)", capsys.readouterr().out)
    assert states == ["prebuilt kernels run", "kernels built here run"]
