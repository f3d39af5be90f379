"""NaN and infinity in weights, moments, gradients or loss: never in a complete checkpoint."""

import itertools
import math
import os
from random import Random

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
PLACES = ("weight", "moment", "gradient", "loss")
OPTIMIZERS = {"adamw": (), "muon": ("optim.name=muon",), "muon-lags": RECIPE}
EVERY = list(
    itertools.product(PLACES, OPTIMIZERS, ("no", "bf16", "fp16"), (1, 2), ("stop", "skip"))
)


def pairwise(cases: list[tuple]) -> list[tuple]:
    """A few of the cases, in which every two values that stand together in one of all cases do."""
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


FEW, RANDOM = pairwise(EVERY), Random(0)
CASES = [
    pytest.param(
        *(*case, RANDOM.randint(1, 4), RANDOM.choice(("nan", "inf", "-inf"))),
        marks=() if case in FEW else pytest.mark.slow,
    )
    for case in EVERY
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
    assert "after the last step the validation loss is not finite" in message


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
