"""What a checkpoint holds: the state of its step, whatever it is and however late it is written."""

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from models import small_model
from runs import FSDP, RECIPE, assert_same
from safetensors.torch import load_file

from mixer.checkpoints import snapshot
from mixer.checkpoints.restore import load_optimizer
from mixer.checkpoints.writer import CheckpointWriter
from mixer.data.manifest import Manifest
from mixer.distributed.world import World
from mixer.training.config import load_config
from mixer.training.gradients import Guard
from mixer.training.loop import train


def test_a_checkpoint_loads_alone_in_fp32_and_is_readable_as_the_umask_says(finished, tmp_path):
    moved = shutil.copytree(finished / "step-12", tmp_path / "moved")
    shutil.rmtree(moved / "trainer_state")  # what from_pretrained needs is outside of it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(moved),
        AutoTokenizer.from_pretrained(moved),
    )
    assert all(
        str(t.dtype) == "torch.float32" for t in load_file(moved / "model.safetensors").values()
    )
    text = tokenizer.decode(
        model.generate(tokenizer("def ", return_tensors="pt").input_ids, max_new_tokens=5)[0]
    )
    assert text.startswith("def ")
    assert (finished / "step-12/model.safetensors").stat().st_mode == (
        finished / "metrics.jsonl"
    ).stat().st_mode
    assert Manifest.load(
        json.loads((finished / "step-12/trainer_state/trainer.json").read_text())["data_directory"]
    )


def test_nothing_is_unpickled_from_a_checkpoint(finished):
    kinds = {file.suffix for file in finished.rglob("step-*/**/*") if file.is_file()}
    # the model's own code, for those who have not installed this package
    assert kinds <= {".json", ".safetensors", ".py"}
    grep = subprocess.run(
        ["grep", "-rlE", r"torch\.load|pickle\.load", "mixer"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert grep.stdout == ""


class KeepsMore(torch.optim.Optimizer):
    """An optimizer whose state has other keys and shapes than AdamW's."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            moment = torch.randn_like(parameter)
            kept = {"momentum": moment, "lags": moment.flatten()[:3], "calls": torch.tensor(2.0)}
            self.state[parameter] = kept


def test_the_best_checkpoint_is_that_of_the_losses_when_it_was_asked_for(tmp_path):
    """A thread links it while training goes on and adds losses, which broke a run now and then."""
    submitted = []
    writer = SimpleNamespace(main=True, directory=tmp_path, say=print)
    writer._submit = lambda job, *arguments: submitted.append(arguments)
    losses = {4: 2.5}
    CheckpointWriter.link_best(writer, losses)
    losses[8] = 2.0
    assert submitted[0][1] == {4: 2.5}


def snapshots_fetched_late() -> None:
    """Snapshots as on a GPU with room for them, in small pieces, and fetched when training has gone
    on.
    """
    real = snapshot.DeviceCopy.fetch
    snapshot.has_room = lambda device, needed: True
    snapshot.STAGE_BYTES, snapshot.QUEUED_BYTES = 1000, 5000

    def fetch(copy):
        time.sleep(0.3)
        return real(copy)

    snapshot.DeviceCopy.fetch = fetch


@pytest.mark.parametrize(
    ("settings", "processes", "environment"),
    [(RECIPE, 1, {}), ((), 2, FSDP)],
    ids=["recipe", "fsdp"],
)
def test_a_snapshot_holds_the_state_of_its_step_however_late_it_is_fetched(
    write_config, launch, tmp_path, settings, processes, environment
):
    command = ("--config", write_config(), *settings)
    options = {"processes": processes, "environment": environment}
    launch(*command, "name=plain", **options).succeed()
    launch(*command, "name=late", before=snapshots_fetched_late, **options).succeed()
    for step in (8, 12):
        assert_same(tmp_path / "runs/late", tmp_path / "runs/plain", step)


def test_a_snapshot_takes_tensors_of_any_type_and_shape_again_and_again(monkeypatch):
    monkeypatch.setattr(snapshot, "has_room", lambda device, needed: True)
    small = torch.arange(6, dtype=torch.int64).view(2, 3)
    copy = snapshot.choose_copy(torch.device("cpu"), snapshot.room_for([small]))
    assert copy.room == 512
    large = [small, torch.tensor(2.5), torch.randn(300, dtype=torch.float64)[::2]]
    copy = snapshot.choose_copy(torch.device("cpu"), snapshot.room_for(large))
    for _ in range(2):
        copy.begin()
        for number, tensor in enumerate(large):
            copy.copy(str(number), tensor)
        copy.finish()
        wanted = [tensor.clone() for tensor in large]
        for tensor in large:
            tensor.add_(1)
        assert all(map(torch.equal, copy.fetch().values(), wanted))


def test_whatever_state_an_optimizer_has_comes_back(tmp_path):
    model = small_model()
    optimizer = KeepsMore(model.parameters(), {})
    optimizer.step()
    world = World(Accelerator(cpu=True))
    writer = CheckpointWriter(tmp_path, 2, 0, world, model, NoTokenizer())
    (tmp_path / "metrics.jsonl").touch()
    writer.save(optimizer, {"step": 3})
    writer.close()
    fresh = KeepsMore(model.parameters(), {})
    load_optimizer(tmp_path / "step-3", model, fresh)
    assert fresh.state.keys() == optimizer.state.keys()
    for parameter, saved in optimizer.state.items():
        loaded = fresh.state[parameter]
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)


class NoTokenizer:
    def save_pretrained(self, directory):
        pass


@pytest.mark.parametrize("room", [True, False])
def test_the_state_is_copied_before_the_run_waits_for_its_step_where_that_costs_no_time(
    write_config, monkeypatch, room
):
    """It does where copies on the device are queued behind the step. Copies to the host take longer
    than it, and a line of metrics would wait for them.
    """
    events, write_on = [], threading.Event()
    real_prepare, real_copy = CheckpointWriter.prepare, CheckpointWriter._copy
    real_look, real_write = Guard.look, CheckpointWriter._write

    def prepare(writer, optimizer):
        if events.count("copy") == 1:
            writer.wait()  # so the second save finds the first one written
        real_prepare(writer, optimizer)

    def copy(*arguments):
        events.append("copy")
        return real_copy(*arguments)

    def look(guard):
        events.append("wait")
        if events.count("wait") == 6:  # the third save's
            write_on.set()
        return real_look(guard)

    def write(*arguments):
        assert events.count("copy") == 1 or write_on.wait(60)
        real_write(*arguments)

    monkeypatch.setattr(CheckpointWriter, "prepare", prepare)
    monkeypatch.setattr(CheckpointWriter, "_copy", copy)
    monkeypatch.setattr(CheckpointWriter, "_write", write)
    monkeypatch.setattr(Guard, "look", look)
    monkeypatch.setattr(snapshot, "has_room", lambda device, needed: room)
    settings = ("train.steps=6", "train.eval_every=0", "checkpoint.save_every=2")
    train(load_config(str(write_config()), [*settings, "logging.log_every=2"]))
    waits = ["wait", "wait"]  # for the metrics, and for the save
    second = ["copy", *waits] if room else [*waits, "copy"]
    # The first makes the memory for the copies, and the third waits for the second.
    assert events == [*waits, "copy", *second, *waits, "copy"]
