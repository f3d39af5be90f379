"""Snapshots on a GPU that is pretended: its streams run as early or as late as the waits allow."""

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from mixer.checkpoints import snapshot

GPU = torch.device("cuda")


class Stream:
    """A queue of work. An eager one runs what it is given at once, any other when it is waited
    for.
    """

    eager, current = False, None

    def __init__(self, device: torch.device):
        self.work: list[Callable] = []
        self.done = 0

    def give(self, work: Callable) -> None:
        self.work.append(work)
        if self.eager:
            self.run(len(self.work))

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.work[self.done - 1]()

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.give(event.synchronize)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Event:
    def __init__(self, blocking: bool = False):
        self.stream, self.end = None, 0

    def record(self, stream: Stream) -> None:
        self.stream, self.end = stream, len(stream.work)

    def synchronize(self) -> None:
        self.stream.run(self.end)


@contextmanager
def on_stream(stream: Stream):
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


@pytest.fixture
def training_stream(monkeypatch) -> Stream:
    """The current stream of the pretended GPU, whose memory is the host's."""
    empty, copy, copy_all = torch.empty, torch.Tensor.copy_, torch._foreach_copy_

    def copy_later(target, source, non_blocking=False):
        give = Stream.current.give if non_blocking else lambda work: work()
        give(lambda: copy(target, source))

    def copy_all_later(targets, sources, non_blocking):
        Stream.current.give(lambda: copy_all(targets, sources))

    monkeypatch.setattr(torch, "_foreach_copy_", copy_all_later)
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, **_: empty(*shape, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(snapshot, "STAGE_BYTES", 40)
    monkeypatch.setattr(snapshot, "QUEUED_BYTES", 100)
    with on_stream(Stream(GPU)):
        yield Stream.current


@pytest.fixture(params=["device", "host"])
def taken(training_stream, monkeypatch, request) -> snapshot.Snapshot:
    monkeypatch.setattr(snapshot, "has_room", lambda device, needed: request.param == "device")
    return snapshot.Snapshot(GPU, 1000)


@pytest.mark.parametrize("ahead", ["training", "copying"])
def test_a_snapshot_has_the_state_of_its_step_whichever_stream_is_ahead(
    training_stream, taken, ahead
):
    tensors = {str(size): torch.zeros(size) for size in (1, 30, 7)}
    (training_stream if ahead == "training" else taken.stream).eager = True

    def step() -> None:
        for tensor in tensors.values():
            training_stream.give(lambda tensor=tensor: tensor.add_(1))

    for number, fetched_late in ((1, False), (3, True)):
        step()
        taken.take(tensors.items())
        if fetched_late:
            step()
        found = {name: copy.clone() for name, copy in taken.fetch().items()}
        if not fetched_late:
            step()
        wanted = {name: torch.full_like(tensor, number) for name, tensor in tensors.items()}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_snapshot_of_other_tensors_has_nothing_of_those_before(taken):
    numbers = torch.arange(12)
    states = [
        {"weight": numbers.float(), "step": numbers[:1].half()},
        {"step": numbers[:1].bfloat16(), "weight": numbers.view(3, 4).float().t()},
        {"weight": numbers.double(), "moment": numbers[:7].float(), "step": numbers[0].half()},
    ]
    for state in [*states, *reversed(states)]:
        taken.take(state.items())
        found = taken.fetch()
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
