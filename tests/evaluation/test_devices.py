"""Where an evaluation computes."""

import re

import pytest
import torch

from mixer.common import hardware
from mixer.common.errors import UserError, warn
from mixer.distributed.world import build_accelerator
from mixer.evaluation.scoring import choose_device


def test_a_gpu_that_is_not_there_is_refused_and_auto_does_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda, but PyTorch sees no GPU: use cpu"):
        choose_device("cuda", "fp32")
    assert choose_device("auto", "fp32") == torch.device("cpu")


@pytest.fixture
def blind(monkeypatch, tmp_path):
    """As where torch sees no GPU, on a machine without a driver. Returns the driver's folder."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "nvidia")
    warn.cache_clear()
    return tmp_path / "nvidia"


def test_a_gpu_that_should_be_there_is_missed_once_in_evaluation_and_training(
    blind, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")  # of which CUDA sees none
    choose_device("auto", "fp32")
    said = capsys.readouterr().err
    assert re.fullmatch("warning: on the CPU, as torch .* no GPU, .* is 0,0: name GPUs .*\n", said)
    choose_device("auto", "fp32")
    assert not capsys.readouterr().err
    warn.cache_clear()
    assert build_accelerator("no").device.type == "cpu"
    assert capsys.readouterr().err == said


def test_a_driver_without_a_gpu_is_told(blind, capsys):
    blind.mkdir()
    choose_device("auto", "fp32")
    assert re.search("warning: on the CPU, .* a driver .*mixer doctor", capsys.readouterr().err)


@pytest.mark.parametrize("visible", [None, "", "-1"])
def test_no_gpu_is_missed_where_there_is_none_or_the_cpu_is_asked_for(
    blind, monkeypatch, capsys, visible
):
    if visible is not None:
        blind.mkdir()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    choose_device("auto", "fp32")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    choose_device("cpu", "fp32")
    assert not capsys.readouterr().err
