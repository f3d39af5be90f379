"""What a checkpoint holds: the state of its step, however late it is written, and never a NaN or an
infinity.
"""

import os
import shutil
import time

import pytest
from bad_numbers import plant, scaled_in_fp32
from runs import FSDP, RECIPE, assert_same, read_lines, refusal
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mixer.checkpoints.checkpoint import damage
from mixer.checkpoints.writer import CheckpointWriter, not_finite


def test_a_checkpoint_loads_alone_in_fp32_and_is_readable_as_the_umask_says(finished, tmp_path):
    moved = shutil.copytree(finished / "step-12", tmp_path / "moved")
    shutil.rmtree(moved / "trainer_state")  # what from_pretrained needs is outside of it
    model = AutoModelForCausalLM.from_pretrained(moved)
    tokenizer = AutoTokenizer.from_pretrained(moved)
    weights = load_file(moved / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}
    prompt = tokenizer("def ", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(prompt, max_new_tokens=5)[0]).startswith("def ")
    mode = (finished / "metrics.jsonl").stat().st_mode
    assert (finished / "step-12/model.safetensors").stat().st_mode == mode


def test_nothing_is_unpickled_from_a_checkpoint(finished):
    kinds = {file.suffix for file in finished.rglob("step-*/**/*") if file.is_file()}
    # the model's own code, for those who have not installed this package
    assert kinds <= {".json", ".safetensors", ".py"}


def written_late() -> None:
    """Checkpoints that are written when training has gone on."""
    real = CheckpointWriter._write

    def write(*arguments):
        time.sleep(0.3)
        real(*arguments)

    CheckpointWriter._write = write


def test_an_fsdp_checkpoint_holds_the_state_of_its_step_however_late_it_is_written(
    write_config, launch, tmp_path
):
    options = {"processes": 2, "environment": FSDP}
    launch("--config", write_config(), "name=plain", **options).succeed()
    late = {"before": written_late} | options
    launch("--config", write_config(), "name=late", **late).succeed()
    for step in (8, 12):
        assert_same(tmp_path / "runs/late", tmp_path / "runs/plain", step)


SHORT = ("train.steps=4", "checkpoint.save_every=1", "train.eval_every=0", "train.eval_samples=8")
OPTIMIZERS = {"adamw": (), "muon": ("optim.name=muon",), "muon-lags": RECIPE}
CASES = [
    ("weight", "adamw", "no", 1, "stop", 4, "inf"),
    ("weight", "muon", "bf16", 2, "skip", 4, "-inf"),
    ("moment", "adamw", "bf16", 2, "stop", 1, "nan"),
    ("moment", "muon-lags", "fp16", 1, "skip", 2, "-inf"),
    ("gradient", "adamw", "fp16", 2, "stop", 1, "-inf"),
    ("gradient", "muon", "no", 1, "skip", 4, "-inf"),
    ("loss", "adamw", "fp16", 1, "skip", 1, "nan"),
    ("loss", "muon", "bf16", 1, "stop", 3, "inf"),
    ("loss", "muon-lags", "no", 2, "skip", 1, "-inf"),
]


def plant_in_the_last_process() -> None:
    environment = os.environ
    if environment["PRECISION"] == "fp16":
        scaled_in_fp32(init_scale=8.0)
    if environment.get("RANK", "0") == str(int(environment.get("WORLD_SIZE", "1")) - 1):
        plant(environment["PLACE"], int(environment["STEP"]), float(environment["BAD"]))


@pytest.mark.parametrize(
    ("place", "optimizer", "precision", "processes", "non_finite", "step", "bad"), CASES
)
def test_a_number_that_is_not_finite_is_in_no_checkpoint_and_ends_the_run_or_is_counted(
    write_config, launch, tmp_path, place, optimizer, precision, processes, non_finite, step, bad
):
    """fp16 is fp32 with fp16's loss scale, which skips a bad gradient whatever it is asked."""
    planted = {"PLACE": place, "STEP": str(step), "BAD": bad, "PRECISION": precision}
    options = {"processes": processes, "environment": planted, "before": plant_in_the_last_process}
    settings = [*SHORT, *OPTIMIZERS[optimizer], f"train.non_finite={non_finite}"]
    settings += [f"train.mixed_precision={'no' if precision == 'fp16' else precision}"]
    ranks, run = launch("--config", write_config(), *settings, **options), tmp_path / "runs/small"
    codes = set(ranks.wait())
    counted = place == "loss" and (non_finite == "skip" or precision == "fp16")
    if counted:
        assert codes == {0}, ranks.output
        lines = read_lines(run)
        assert [line["step"] for line in lines if line.get("loss", 0) is None] == [step]
        assert [line["skipped_steps"] for line in lines if "loss" in line][-1] == 1
    else:
        assert codes <= {1, 2}, ranks.output
        assert "not finite" in ranks.output and f"step {step}" in ranks.output
    last = 4 if counted else step - 1
    good = [f"step-{number}" for number in (last - 1, last) if number > 0]
    assert sorted(path.name for path in run.glob("step-*")) == good
    for name in good:
        assert damage(run / name) is None
        for file in (run / name).rglob("*.safetensors"):
            assert not_finite(load_file(file)) == [], file


def test_a_run_that_saves_nothing_does_not_end_well_with_weights_that_are_not_finite(write_config):
    nothing_saved = ("checkpoint.save_every=0", "checkpoint.save_last=false")
    one_huge_step = ("train.steps=1", "optim.lr=1e300", "optim.warmup_steps=0")
    said = refusal(write_config(), *SHORT, *nothing_saved, *one_huge_step)
    assert "after the last step the validation loss is not finite" in said
