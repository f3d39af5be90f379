"""What auto takes before a run's first step: on a CPU, with made-up times in place of a GPU's."""

import json
import os

import pytest
import torch
from runs import assert_same

from mixer.models.masked_mixer import convolution as layers
from mixer.ops import choice
from mixer.training import mixing

TAKES = "token mixing: auto takes"
KEYED = ["model.num_mixer_heads=2", "model.mixer_gate=true", "model.mixer_key_size=4"]
KEYED += ["model.mixer_keyed_every=2"]


def made_up() -> None:
    """A GPU for mixer.training.mixing alone, on which plain PyTorch does what the kernels are to
    do. TIMES has milliseconds by process, of cuda and dense; KERNELS says what is wrong with the
    kernels. Each process prints the backends that its run takes.
    """
    rank, kernels = int(os.environ.get("RANK", "0")), os.environ["KERNELS"]
    times = dict(zip(("cuda", "dense"), json.loads(os.environ["TIMES"])[rank], strict=True))
    seen = set()
    mixing.has_kernels = lambda device: True
    missing = kernels if kernels == "there is no nvcc" else None
    choice.call_reason = choice.keyed_unavailable_reason = lambda *_: missing
    choice.keyed_kernels_serve = lambda *_: False
    torch.cuda.get_device_name = lambda device=None: os.environ["GPU"]
    capability = (9, 0) if os.environ["GPU"] == "H200" else (7, 0)
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.reset_peak_memory_stats = lambda device: None
    mixing.RACE_SECONDS, measure = 0.001, mixing.milliseconds
    mixing.milliseconds = lambda step: measure(step) and times[mixing.racing]

    def noted(real, what):
        def call(*tensors, backend, **about):
            if mixing.racing:
                mixing.racing = backend
            elif (what, backend) not in seen:
                seen.add((what, backend))
                print(f"process {rank} runs {what} by {backend}", flush=True)
            if backend == "cuda" and kernels == "fail":
                raise RuntimeError("no kernel image")
            y = real(*tensors, backend="dense", **about)
            return y * 1.1 if backend == "cuda" and kernels == "wrong" else y

        return call

    def race(*about):
        mixing.racing = "begins"
        chosen = real_race(*about)
        mixing.racing = ""
        return chosen

    mixing.racing, real_race = "", mixing.race
    mixing.race = race
    layers.triangular_conv = noted(layers.triangular_conv, "convolutions")
    layers.keyed_conv = noted(layers.keyed_conv, "keyed mixing")


@pytest.fixture
def begin(write_config, launch):
    """Starts a run with the milliseconds of cuda and dense of each process."""

    def start(*times, gpu="Tesla V100", kernels="right", changes=(), name="small"):
        environment = {"TIMES": json.dumps(times), "GPU": gpu, "KERNELS": kernels}
        command = ("--config", write_config(), f"name={name}", *changes)
        return launch(*command, processes=len(times), environment=environment, before=made_up)

    return start


def trainer_of(checkpoint) -> dict:
    return json.loads((checkpoint / "trainer_state/trainer.json").read_text())


def test_processes_that_measure_differently_take_what_the_first_finds_faster(begin, tmp_path):
    output = begin((2.0, 1.5), (1.0, 9.0)).succeed()
    said = f"{TAKES} dense, the faster on Tesla V100: dense 1.500 ms, cuda 2.000 ms"
    assert said in output and output.count(TAKES) == 1
    assert "process 0 runs convolutions by dense" in output
    assert "process 1 runs convolutions by dense" in output and "by cuda" not in output
    assert trainer_of(tmp_path / "runs/small/step-12")["mixing"] == {"backend": "dense"}
    config = json.loads((tmp_path / "runs/small/step-12/config.json").read_text())
    assert config["mixing_backend"] == "auto"  # the model stays as it was


def test_a_resume_keeps_the_choice_although_the_times_have_changed(begin, tmp_path):
    begin((2.0, 1.5), name="whole").succeed()
    parts = begin((2.0, 1.5), name="parts", changes=["checkpoint.save_every=5"])
    parts.until((tmp_path / "runs/parts/step-5").exists).kill()
    output = begin((1.0, 9.0), name="parts").succeed()
    assert f"{TAKES} dense, as the run did before" in output and "by cuda" not in output
    assert_same(tmp_path / "runs/parts", tmp_path / "runs/whole", 12)


@pytest.mark.parametrize("record", [None, {"backend": "panels"}])
def test_a_checkpoint_without_a_choice_that_can_be_kept_goes_on_by_a_new_one(
    begin, finished, record
):
    """Of an earlier version, or of a run on a CPU."""
    trainer = trainer_of(finished / "step-12")
    del trainer["mixing"]
    if record is not None:
        trainer["mixing"] = record
    write_trainer(finished / "step-12", trainer)
    output = begin((1.0, 2.0), changes=["train.steps=13"]).succeed()
    assert f"{TAKES} cuda, the faster" in output and "convolutions by cuda" in output


def test_keyed_mixing_is_chosen_apart_and_a_resume_keeps_that_too(begin, tmp_path):
    output = begin((2.0, 1.5), changes=KEYED).succeed()
    assert f"{TAKES} dense" in output and "runs convolutions by dense" in output
    assert "keyed mixing: auto takes dense, the faster" in output
    saved = trainer_of(tmp_path / "runs/small/step-12")
    assert saved["mixing"] == {"backend": "dense", "keyed": {"backend": "dense"}}
    saved["mixing"]["keyed"] = {"backend": "panels", "gpu": "Tesla V100"}  # of an earlier version
    write_trainer(tmp_path / "runs/small/step-12", saved)
    output = begin((1.0, 9.0), changes=[*KEYED, "train.steps=13"]).succeed()
    assert f"{TAKES} dense, as the run did before" in output
    assert "keyed mixing: auto takes cuda, the faster" in output
    assert "process 0 runs keyed mixing by cuda" in output


def write_trainer(checkpoint, trainer: dict) -> None:
    """Changes a file of a checkpoint, and what its listing says of it."""
    from mixer.common.checksums import sha256

    name = "trainer_state/trainer.json"
    file, listing = checkpoint / name, checkpoint / "trainer_state/files.json"
    file.write_text(json.dumps(trainer))
    files = json.loads(listing.read_text())
    files[name] = {"size": file.stat().st_size, "sha256": sha256(file)}
    listing.write_text(json.dumps(files))


def test_on_hopper_there_is_no_race(begin):
    output = begin((2.0, 1.0), gpu="H200").succeed()
    assert f"{TAKES} cuda, the fastest wherever it was timed on such GPUs" in output
    assert "runs convolutions by cuda" in output


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ("there is no nvcc", "since 'cuda' cannot run here: there is no nvcc"),
        ("fail", "dense 9.000 ms; without cuda: RuntimeError: no kernel image"),
        ("wrong", "without cuda: its results are wrong on this GPU: y is"),
    ],
)
def test_kernels_that_are_missing_fail_or_are_wrong_are_left_out(begin, kernels, said):
    output = begin((1.0, 9.0), kernels=kernels).succeed()
    assert f"{TAKES} dense" in output and said in output and "by cuda" not in output
