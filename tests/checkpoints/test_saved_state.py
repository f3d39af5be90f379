"""What a checkpoint holds: the state of its step, whatever it is and however late it is written."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from models import small_model
from runs import FSDP, assert_same
from safetensors.torch import load_file

from mixer.checkpoints.restore import load_optimizer
from mixer.checkpoints.state import begin_state
from mixer.checkpoints.writer import CheckpointWriter
from mixer.data.prepared import Manifest
from mixer.distributed.world import World


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


def written_late() -> None:
    """Checkpoints that are written when training has gone on."""
    real = CheckpointWriter._write

    def write(*arguments):
        time.sleep(0.3)
        real(*arguments)

    CheckpointWriter._write = write


def test_a_checkpoint_holds_the_state_of_its_step_however_late_it_is_written(
    write_config, launch, tmp_path
):
    options = {"processes": 2, "environment": FSDP}
    launch("--config", write_config(), "name=plain", **options).succeed()
    late = {"before": written_late} | options
    launch("--config", write_config(), "name=late", **late).succeed()
    for step in (8, 12):
        assert_same(tmp_path / "runs/late", tmp_path / "runs/plain", step)


def test_whatever_state_an_optimizer_has_comes_back(tmp_path):
    model = small_model()
    optimizer = KeepsMore(model.parameters(), {})
    optimizer.step()
    world = World(Accelerator(cpu=True))
    writer = CheckpointWriter(tmp_path, 2, 0, world, model, NoTokenizer())
    (tmp_path / "metrics.jsonl").touch()
    writer.save(optimizer, {"step": 3})
    writer.wait()
    writer.close()
    fresh = KeepsMore(model.parameters(), {})
    begin_state(fresh)
    load_optimizer(tmp_path / "step-3", model, fresh)
    assert fresh.state.keys() == optimizer.state.keys()
    for parameter, saved in optimizer.state.items():
        loaded = fresh.state[parameter]
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)


class NoTokenizer:
    def save_pretrained(self, directory):
        pass
