"""Numbers that are not finite: kept from the weights, counted, and named; fp16's loss scale."""

import math
import os

import pytest
from bad_numbers import scaled_in_fp32
from runs import RECIPE, assert_same, read_lines

from mixer.checkpoints.checkpoint import damage
from mixer.training import optim

LONG = {"steps": 200, "batch_size": 4, "eval_every": 0, "eval_samples": 8}


def bad_loss_at() -> None:
    """The loss of process BAD_RANK is NaN at the steps BAD_STEPS, of data that makes it so each
    time it is used.
    """
    from mixer.objectives import language
    from mixer.training import loop

    steps = {int(step) for step in os.environ["BAD_STEPS"].split(",")}
    is_bad_process = os.environ.get("RANK", "0") == os.environ["BAD_RANK"]
    real_at, real_device, real_nats = loop.Batches.at, loop.to_device, language.token_nats
    mark, factor = 10_000_000, [1.0]

    def at(batches, position):
        made = real_at(batches, position)
        if is_bad_process and position // batches.step_samples + 1 in steps:
            made[0][0][0, 0] = mark
        return made

    def to_device(batch, device):
        inputs, targets = real_device(batch, device)
        factor[0] = math.nan if inputs.max() >= mark else 1.0
        return inputs.clamp(max=1), targets

    loop.Batches.at, loop.to_device = at, to_device
    language.token_nats = lambda logits, targets: real_nats(logits * factor[0], targets)


@pytest.mark.parametrize(("processes", "settings"), [(1, ()), (2, RECIPE)])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(
    write_config, launch, tmp_path, processes, settings
):
    config = write_config(train=LONG, checkpoint={"save_every": 5}, logging={"log_every": 8})
    environment = {"BAD_STEPS": "12", "BAD_RANK": str(processes - 1)}
    options = {"processes": processes, "environment": environment, "before": bad_loss_at}
    ranks = launch("--config", config, *settings, **options)
    assert set(ranks.wait()) <= {1, 2}
    assert "the gradient of step 12 is not finite" in ranks.output
    run = tmp_path / "runs/small"
    # looked at before saving
    assert damage(run / "step-10") is None and not (run / "step-15").exists()
    assert max(line["step"] for line in read_lines(run)) == 8


def test_skipping_counts_the_steps_and_leaves_the_weights_as_if_they_had_not_been(
    write_config, launch, tmp_path
):
    train = LONG | {"steps": 12, "non_finite": "skip"}
    config = write_config(train=train, checkpoint={"save_every": 1, "keep": 12})
    environment = {"BAD_STEPS": "3,7,8", "BAD_RANK": "0"}
    ranks = launch("--config", config, *RECIPE, environment=environment, before=bad_loss_at)
    assert "3 skipped" in ranks.succeed()
    run = tmp_path / "runs/small"
    lines = [line for line in read_lines(run) if "loss" in line]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3]
    assert [line["step"] for line in lines if line["loss"] is None] == [3, 7, 8]
    for file in ("model.safetensors", "trainer_state/optimizer-1-of-1.safetensors"):
        saved = [(run / f"step-{step}" / file).read_bytes() for step in range(1, 13)]
        unchanged = [step for step in range(2, 13) if saved[step - 1] == saved[step - 2]]
        assert unchanged == [3, 7, 8], file


def bad_and_impatient() -> None:
    bad_loss_at()
    optim.MOST_SKIPPED = 4


def scaled_and_bad() -> None:
    scaled_in_fp32()
    bad_and_impatient()


@pytest.mark.parametrize(
    ("before", "bad_steps", "last", "advice"),
    [
        (bad_and_impatient, (3, 4, 5, *range(20, 31)), 23, "lower optim.lr"),
        (scaled_and_bad, range(1, 31), 4, "train.mixed_precision=bf16"),
    ],
    ids=["fp32", "loss scale"],
)
def test_too_many_skipped_steps_in_a_row_end_the_run(
    write_config, launch, before, bad_steps, last, advice
):
    config = write_config(train=LONG | {"non_finite": "skip"})
    environment = {"BAD_STEPS": ",".join(map(str, bad_steps)), "BAD_RANK": "0"}
    ranks = launch("--config", config, environment=environment, before=before)
    assert ranks.wait() == [2]
    assert f"4 steps in a row were skipped, up to step {last}" in ranks.output
    assert advice in ranks.output
    assert "allowed: fewer than 4" in ranks.output


def test_a_run_that_skips_its_steps_to_the_end_does_not_end_well(write_config, launch, tmp_path):
    config = write_config(train={"steps": 6, "non_finite": "skip", "max_grad_norm": 0.0})
    rates = ("optim.lr=1e18", "optim.warmup_steps=0")
    ranks = launch("--config", config, *rates, processes=2)
    assert set(ranks.wait()) <= {1, 2}
    assert "after the last step the validation loss is not finite: nan" in ranks.output
    lines = read_lines(tmp_path / "runs/small")
    assert not any(line["step"] and "validation_loss" in line for line in lines)


def test_the_loss_scale_falls_until_gradients_fit_and_rises_again_and_is_resumed(
    write_config, launch, tmp_path
):
    config = write_config(train=LONG | {"steps": 20}, checkpoint={"save_every": 5})
    options = {"processes": 2, "before": scaled_in_fp32}
    command = ("--config", config, *RECIPE)
    launch(*command, "name=whole", **options).succeed()
    lines = [line for line in read_lines(tmp_path / "runs/whole") if "loss" in line]
    before, counted = 2.0**127, 0
    for line in lines:  # a skipped step halves the scale, and nothing else does
        assert (line["loss_scale"] == before / 2) == (line["skipped_steps"] == counted + 1)
        before, counted = line["loss_scale"], line["skipped_steps"]
    assert [line["skipped_steps"] for line in lines[:3]] == [1, 2, 3] and counted < 10
    scales = [line["loss_scale"] for line in lines]
    # risen after 5 good steps
    assert any(later == 2 * earlier for earlier, later in zip(scales, scales[1:], strict=False))
    assert not any(line["loss"] is None for line in lines)
    whole, parts = tmp_path / "runs/whole", tmp_path / "runs/parts"
    launch(*command, "name=parts", **options).until((parts / "step-5").exists).kill()
    launch(*command, "name=parts", **options).succeed()
    assert_same(parts, whole, 20)
