"""What auto uses before a run's first step: on a CPU, with made-up times in place of a GPU's."""

import json
import os

import pytest
import torch
from runs import assert_same

from mixer.common.errors import UserError
from mixer.common.files import sha256
from mixer.models.masked_mixer import convolution as layers
from mixer.training import backend as module
from mixer.training import start

USES = "token mixing: auto uses"


def made_up() -> None:
    """A GPU for mixer.training.backend alone, on which plain PyTorch does what the kernels are to
    do. TIMES has milliseconds by process, of dense and cuda; KERNELS says what is wrong with the
    kernels. Each process prints the backends that its run takes.
    """
    rank, kernels = int(os.environ.get("RANK", "0")), os.environ["KERNELS"]
    times, seen = json.loads(os.environ["TIMES"])[rank], set()
    start.needs_race = lambda run, device: True
    torch.cuda.get_device_name = lambda device=None: "Tesla V100"
    torch.cuda.reset_peak_memory_stats = lambda device: None
    module.milliseconds = lambda step: times.pop(0)

    def with_kernels(real):
        def conv(*tensors, backend, **about):
            if not times and (real, backend) not in seen:
                seen.add((real, backend))
                print(f"process {rank} runs {real.__name__} by {backend}", flush=True)
            if backend == "cuda" and kernels == "missing":
                raise UserError("there is no nvcc")
            y = real(*tensors, backend="dense", **about)
            return y * 1.1 if backend == "cuda" and kernels == "wrong" else y

        return conv

    layers.triangular_conv = with_kernels(layers.triangular_conv)
    layers.keyed_conv = with_kernels(layers.keyed_conv)


@pytest.fixture
def begin(write_config, launch):
    """Starts a run with the milliseconds of dense and cuda of each process."""

    def start(*times, kernels="right", changes=(), name="small"):
        environment = {"TIMES": json.dumps(times), "KERNELS": kernels}
        command = ("--config", write_config(), f"name={name}", *changes)
        return launch(*command, processes=len(times), environment=environment, before=made_up)

    return start


def test_processes_take_what_the_first_finds_faster(begin, tmp_path):
    output = begin([1.5, 2.0], []).succeed()
    said = f"{USES} dense, the faster on Tesla V100: dense 1.500 ms, cuda 2.000 ms"
    assert said in output and output.count(USES) == 1
    assert "process 0 runs triangular_conv by dense" in output
    assert "process 1 runs triangular_conv by dense" in output and "by cuda" not in output
    config = json.loads((tmp_path / "runs/small/step-12/config.json").read_text())
    assert config["mixing_backend"] == "auto"  # the model stays as it was


def test_keyed_mixing_and_what_is_between_have_a_race_each(begin, tmp_path):
    keyed = ["model.mixer_key_size=4", "model.num_mixer_heads=2", "model.mixer_keyed_every=2"]
    changes = [*keyed, "model.mixing_init=shift", "model.num_hidden_layers=2"]
    output = begin([1.5, 2.0, 4.0, 3.0], changes=changes).succeed()
    assert f"{USES} dense, " in output and "runs triangular_conv by dense" in output
    assert "keyed mixing: auto uses cuda, the faster on Tesla V100: dense 4.000 ms" in output
    assert "process 0 runs keyed_conv by cuda" in output
    kept = json.loads((tmp_path / "runs/small/step-12/trainer_state/trainer.json").read_text())
    assert kept["mixing"] == {"backend": "dense", "keyed_backend": "cuda"}


def test_a_resume_keeps_the_choice_although_the_times_have_changed(begin, tmp_path):
    begin([1.5, 2.0], name="whole").succeed()
    parts = begin([1.5, 2.0], name="parts", changes=["checkpoint.save_every=5"])
    parts.until((tmp_path / "runs/parts/step-5").exists).kill()
    assert f"{USES} dense, as the run did before" in begin([], name="parts").succeed()
    assert_same(tmp_path / "runs/parts", tmp_path / "runs/whole", 12)


@pytest.mark.parametrize("gone", ["panels", "cuda"])
def test_a_checkpoint_with_a_backend_that_is_gone_goes_on_by_a_new_choice(begin, finished, gone):
    """Such as kernels for fp32, which is this run's type."""
    file, listing = (finished / "step-12/trainer_state" / n for n in ("trainer.json", "files.json"))
    old = {"backend": gone, "keyed": {"backend": "dense"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mixing": old}))
    listed = {"trainer_state/trainer.json": {"size": file.stat().st_size, "sha256": sha256(file)}}
    listing.write_text(json.dumps(json.loads(listing.read_text()) | listed))
    output = begin([2.0, 1.0], changes=["train.steps=13"]).succeed()
    assert f"{USES} cuda, the faster" in output
    assert "process 0 runs triangular_conv by cuda" in output


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ("missing", "without cuda: UserError: there is no nvcc"),
        ("wrong", "without cuda: its results are wrong on this GPU: y differs"),
    ],
)
def test_kernels_that_are_missing_or_wrong_are_left_out(begin, kernels, said):
    output = begin([9.0, 1.0], kernels=kernels, changes=["train.steps=4"]).succeed()
    assert f"{USES} dense, {said}" in output
