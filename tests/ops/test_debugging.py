"""MIXER_DEBUG: each launch of a kernel waits for the GPU and names the operator and its shapes if
it fails.
"""

import pytest
import torch

from mixer.ops import cuda


class Launches:
    """A library and a GPU that note what is asked of them; `fail_at`: the wait, counted from 1,
    that meets an error.
    """

    def __init__(self, monkeypatch, fail_at=0, status=0, capturing=False):
        self.events, self.fail_at, self.status = [], fail_at, status
        replacements = {
            "current_device": lambda: 0,
            "is_current_stream_capturing": lambda: capturing,
            "synchronize": self.synchronize,
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(cuda, "current_stream", lambda index: 0)
        monkeypatch.setattr(cuda, "kernels", lambda index: self)

    def mixer_forward(self, params):
        self.events.append("launch")
        return self.status

    def mixer_error_string(self, status):
        return b"invalid configuration argument"

    def synchronize(self, device):
        self.events.append("wait")
        if self.events.count("wait") == self.fail_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def debugging(monkeypatch):
    """A function that sets MIXER_DEBUG, which is read once in a process."""

    def switch(value: str):
        monkeypatch.setenv("MIXER_DEBUG", value)
        cuda.debugging.cache_clear()

    yield switch
    monkeypatch.undo()
    cuda.debugging.cache_clear()


def call_forward():
    params = cuda.Params(
        batch=3, tokens=200, channels=520, context=512, heads=4, columns=200, dtype=2
    )
    cuda.call("mixer_forward", params)


def test_debugging_waits_around_each_launch(debugging, monkeypatch):
    debugging("1")
    launches = Launches(monkeypatch)
    call_forward()
    assert launches.events == ["wait", "launch", "wait"]


@pytest.mark.parametrize("value", ["", "0"])
def test_without_debugging_nothing_waits(value, debugging, monkeypatch):
    debugging(value)
    launches = Launches(monkeypatch)
    call_forward()
    assert launches.events == ["launch"]


def test_debugging_does_not_break_a_graph_capture(debugging, monkeypatch):
    debugging("1")
    launches = Launches(monkeypatch, capturing=True)
    call_forward()
    assert launches.events == ["launch"]


def test_debugging_names_operator_and_shapes(debugging, monkeypatch):
    debugging("1")
    Launches(monkeypatch, fail_at=2)
    shapes = "batch=3, tokens=200, channels=520, context=512, heads=4, columns=200, bfloat16"
    with pytest.raises(
        RuntimeError, match=f"^mixer_forward failed on cuda:0: .*illegal memory access.*; {shapes}$"
    ):
        call_forward()


def test_debugging_does_not_take_an_earlier_failure_for_ours(debugging, monkeypatch):
    debugging("1")
    launches = Launches(monkeypatch, fail_at=1)
    with pytest.raises(RuntimeError, match="^an operation before mixer_forward failed on cuda:0"):
        call_forward()
    assert "launch" not in launches.events


def test_refused_launch_names_shapes_and_status(debugging, monkeypatch):
    debugging("0")
    Launches(monkeypatch, status=9)
    with pytest.raises(
        RuntimeError,
        match=r"mixer_forward failed on cuda:0: invalid .* \(CUDA error 9\); batch=3, tokens=200",
    ):
        call_forward()
