"""NaN and infinity in weights, moments, gradients or loss: never in a complete checkpoint."""

import math
import os

import pytest
import torch
from accelerate.state import AcceleratorState
from bad_numbers import plant, scaled_in_fp32
from runs import RECIPE

from mixer.checkpoints.finite import not_finite
from mixer.checkpoints.format import damage
from mixer.common.errors import UserError
from mixer.training import loop, objective
from mixer.training.config import load_config


def failed(config, *overrides: str) -> str:
    """The message of the UserError that ends a run in this process."""
    AcceleratorState._reset_state(True)
    with pytest.raises(UserError) as raised:
        loop.train(load_config(str(config), list(overrides)))
    AcceleratorState._reset_state(True)
    return str(raised.value)


SHORT = ("train.steps=4", "checkpoint.save_every=1", "train.eval_every=0", "train.eval_samples=8")


@pytest.mark.parametrize("what", ["weight", "moment", "gradient", "loss"])
@pytest.mark.parametrize(
    ("settings", "precision", "step", "bad"),
    [
        ((), "no", 3, math.nan),
        (RECIPE, "no", 4, math.inf),
        (RECIPE, "bf16", 1, -math.inf),
        ((), "fp16", 2, math.nan),
    ],
    ids=["adamw-fp32", "muon-fp32", "muon-bf16", "adamw-fp16"],
)
def test_a_number_that_is_not_finite_is_in_no_checkpoint_and_ends_the_run(
    write_config, tmp_path, monkeypatch, what, settings, precision, step, bad
):
    if precision == "fp16":  # which skips a bad gradient: the first one is to end this run
        settings = ("train.max_skipped_steps=1",)
        monkeypatch.setattr(loop, "build_accelerator", loop.build_accelerator)
        monkeypatch.setattr(objective, "token_nats", objective.token_nats)
        scaled_in_fp32(init_scale=8.0)
    else:
        settings = (*settings, f"train.mixed_precision={precision}")
    plant(what, step, bad, monkeypatch.setattr)
    message = failed(write_config(), *SHORT, *settings)
    run = tmp_path / "runs/small"
    good = [f"step-{number}" for number in (step - 2, step - 1) if number > 0]
    assert sorted(path.name for path in run.glob("step-*")) == good
    assert "not finite" in message and f"step {step}" in message
    if good:
        assert damage(run / good[-1]) is None
        assert f"The run can go on from {run / good[-1]}" in message
    else:
        assert "No checkpoint of the run is complete" in message


def test_a_run_that_saves_nothing_does_not_end_well_with_weights_that_are_not_finite(write_config):
    nothing_saved = ("checkpoint.save_every=0", "checkpoint.save_last=false")
    one_huge_step = ("train.steps=1", "optim.lr=1e300", "optim.warmup_steps=0")
    message = failed(write_config(), *SHORT, *nothing_saved, *one_huge_step)
    assert "after step 1 the weights or the optimizer's state are not finite" in message


def plant_in_the_second_process() -> None:
    if os.environ["RANK"] == "1":
        plant("moment", 3, math.nan)


def test_one_process_of_two_stops_both(write_config, launch, tmp_path):
    """Each process has a copy of the state, and only the first one writes it."""
    options = {"processes": 2, "before": plant_in_the_second_process}
    ranks = launch("--config", write_config(), *SHORT, **options)
    assert set(ranks.wait()) <= {1, 2}
    assert "after step 3 the weights or the optimizer's state are not finite" in ranks.output
    assert "on process 1: " in ranks.output and "step-2, its last good" in ranks.output
    run = tmp_path / "runs/small"
    assert damage(run / "step-2") is None and not list(run.glob("step-3*"))


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
