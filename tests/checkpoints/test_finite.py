"""NaN and infinity in weights, moments, gradients or loss: never in a complete checkpoint."""

import math
import os

import pytest
import torch
from accelerate.state import AcceleratorState
from bad_numbers import plant, scaled_in_fp32
from runs import RECIPE, read_lines
from safetensors.torch import load_file

from mixer.checkpoints.format import damage
from mixer.checkpoints.writer import not_finite
from mixer.common.errors import UserError
from mixer.training import loop
from mixer.training.config import load_config


def failed(config, *overrides: str) -> str:
    """The message of the UserError that ends a run in this process."""
    AcceleratorState._reset_state(True)
    with pytest.raises(UserError) as raised:
        loop.train(load_config(str(config), list(overrides)))
    AcceleratorState._reset_state(True)
    return str(raised.value)


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
    message = failed(write_config(), *SHORT, *nothing_saved, *one_huge_step)
    assert "after step 1 the weights or the optimizer's state are not finite" in message


def test_what_is_not_finite_is_named_and_large_numbers_are_finite():
    largest = torch.finfo(torch.float32).max
    held = {
        "large": torch.tensor([largest, -largest]),
        "half": torch.tensor([65504.0], dtype=torch.float16),
        "steps": torch.tensor(7),
        "empty shard": torch.empty(0),
    }
    assert not_finite(held) == []
    held["half"] = held["half"].clone().fill_(math.nan)
    held["brain"] = torch.tensor([1.0, -math.inf], dtype=torch.bfloat16)
    assert not_finite(held) == ["half", "brain"]
