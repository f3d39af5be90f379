"""Numbers that are not finite: kept from the weights, counted, and named; fp16's loss scale."""

import math
import os

import pytest
import torch
from runs import read_lines

from mixer.checkpoints.format import damage
from mixer.common.errors import UserError
from mixer.training.guard import Guard, Skipped, require_finite

LONG = {"steps": 200, "batch_size": 4, "eval_every": 0, "eval_samples": 8}


def bad_loss_at() -> None:
    """The loss of process BAD_RANK is NaN at the steps BAD_STEPS, of data that makes it so each
    time it is used.
    """
    from mixer.training import loop, objective

    real = loop.Batches.at
    steps = {int(step) for step in os.environ["BAD_STEPS"].split(",")}

    def at(batches, position):
        made = real(batches, position)
        if (
            position // batches.share.step_samples + 1 in steps
            and os.environ.get("RANK", "0") == os.environ["BAD_RANK"]
        ):
            made[0][0][0, 0] = 10_000_000  # marked, for the loss below
        return made

    def token_nats(logits, targets):
        return real_nats(logits, targets)

    real_nats, real_device = objective.token_nats, loop.to_device
    marked = [False]

    def to_device(batch, device):
        inputs, targets = real_device(batch, device)
        marked[0] = bool(inputs.max() >= 10_000_000)
        return inputs.clamp(max=1), targets

    loop.Batches.at, loop.to_device = at, to_device
    objective.token_nats = lambda logits, targets: token_nats(
        logits * (math.nan if marked[0] else 1.0), targets
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_finite_stops_the_run_naming_step_process_and_parameter(
    write_config, launch, tmp_path, processes
):
    config = write_config(train=LONG, checkpoint={"save_every": 5}, logging={"log_every": 8})
    environment = {"BAD_STEPS": "12", "BAD_RANK": str(processes - 1)}
    ranks = launch(
        "--config", config, processes=processes, environment=environment, before=bad_loss_at
    )
    assert set(ranks.wait()) <= {1, 2}
    assert "the gradient of step 12 is not finite" in ranks.output
    assert (
        f"on process {processes - 1}: loss nan, gradient of model.embed_tokens.weight and"
        in ranks.output
    )
    assert "on process 0:" not in ranks.output or processes == 1
    run = tmp_path / "runs/small"
    assert (
        damage(run / "step-10") is None and not (run / "step-15").exists()
    )  # looked at before saving
    assert max(line["step"] for line in read_lines(run)) == 8


def test_skipping_counts_the_steps_and_leaves_the_weights_as_if_they_had_not_been(
    write_config, launch, tmp_path
):
    train = LONG | {"steps": 12, "non_finite": "skip"}
    config = write_config(train=train, checkpoint={"save_every": 1, "keep": 12})
    ranks = launch(
        "--config", config, environment={"BAD_STEPS": "3,7,8", "BAD_RANK": "0"}, before=bad_loss_at
    )
    assert "3 skipped" in ranks.succeed()
    run = tmp_path / "runs/small"
    lines = [line for line in read_lines(run) if "loss" in line]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3]
    assert [line["step"] for line in lines if line["loss"] is None] == [3, 7, 8]
    for file in ("model.safetensors", "trainer_state/optimizer-1-of-1.safetensors"):
        saved = [(run / f"step-{step}" / file).read_bytes() for step in range(1, 13)]
        unchanged = [step for step in range(2, 13) if saved[step - 1] == saved[step - 2]]
        assert unchanged == [3, 7, 8], file


def test_too_many_skipped_steps_in_a_row_end_the_run(write_config, launch, tmp_path):
    config = write_config(train=LONG | {"non_finite": "skip", "max_skipped_steps": 4})
    environment = {"BAD_STEPS": "3,4,5,20,21,22,23,24,25,26,27,28,29,30", "BAD_RANK": "0"}
    ranks = launch("--config", config, environment=environment, before=bad_loss_at)
    assert ranks.wait() == [2]
    assert "4 steps in a row were skipped, up to step 23" in ranks.output
    assert (
        "on process 0: loss nan" in ranks.output and "train.max_skipped_steps = 4" in ranks.output
    )
    assert damage(tmp_path / "runs/small/step-20") is None


def test_weights_that_blow_up_are_named(write_config, launch):
    ranks = launch(
        "--config",
        write_config(train=LONG),
        "optim.lr=1e30",
        "optim.warmup_steps=0",
        "train.max_grad_norm=0",
    )
    assert ranks.wait() == [2]
    assert "is not finite: on process 0: loss" in ranks.output


def scaled_in_fp32() -> None:
    """fp16's dynamic loss scale around fp32 arithmetic, from a scale that overflows even that: a
    CPU has no fp16 autocast.
    """
    from mixer.training import loop, objective

    real = loop.build_accelerator

    def build(precision):
        accelerator = real(precision)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=5)
        # accelerate does this itself where mixed_precision is fp16
        accelerator.unscale_gradients = lambda: [
            accelerator.scaler.unscale_(o.optimizer) for o in accelerator._optimizers
        ]
        return accelerator

    real_nats = objective.token_nats
    loop.build_accelerator, objective.token_nats = (
        build,
        lambda *arguments: 256 * real_nats(*arguments),
    )


def scaled_and_always_bad() -> None:
    scaled_in_fp32()
    bad_loss_at()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_loss_scale_falls_until_gradients_fit_and_rises_again_and_is_resumed(
    write_config, launch, tmp_path, processes
):
    config = write_config(train=LONG | {"steps": 20}, checkpoint={"save_every": 5})
    options = {"processes": processes, "before": scaled_in_fp32}
    launch("--config", config, "name=whole", **options).succeed()
    lines = [line for line in read_lines(tmp_path / "runs/whole") if "loss" in line]
    before, counted = 2.0**127, 0
    for line in lines:  # a skipped step halves the scale, and nothing else does
        assert (line["loss_scale"] == before / 2) == (line["skipped_steps"] == counted + 1)
        before, counted = line["loss_scale"], line["skipped_steps"]
    assert [line["skipped_steps"] for line in lines[:3]] == [1, 2, 3] and counted < 10
    scales = [line["loss_scale"] for line in lines]
    assert any(
        later == 2 * earlier for earlier, later in zip(scales, scales[1:], strict=False)
    )  # risen after 5 good steps
    assert not any(line["loss"] is None for line in lines)
    launch("--config", config, "name=parts", **options).until(
        (tmp_path / "runs/parts/step-5").exists
    ).kill()
    launch("--config", config, "name=parts", **options).succeed()
    for name in (
        "model.safetensors",
        "trainer_state/trainer.json",
        "trainer_state/optimizer-1-of-1.safetensors",
    ):
        assert (tmp_path / "runs/parts/step-20" / name).read_bytes() == (
            tmp_path / "runs/whole/step-20" / name
        ).read_bytes()


def test_a_loss_scale_that_never_fits_ends_the_run(write_config, launch):
    config = write_config(train=LONG | {"max_skipped_steps": 6})
    environment = {"BAD_STEPS": ",".join(map(str, range(1, 99))), "BAD_RANK": "0"}
    ranks = launch("--config", config, environment=environment, before=scaled_and_always_bad)
    assert ranks.wait() == [2]
    assert "6 steps in a row were skipped, up to step 6" in ranks.output
    assert "train.mixed_precision=bf16" in ranks.output


def test_a_skipped_step_changes_nothing_in_weights_or_optimizer():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    guard = Guard(optimizer, scaled=False, stop_at_first=False, device=torch.device("cpu"))
    states = []
    for step, value in enumerate([1.0, math.nan, math.inf, 1.0], 1):
        weight.grad = torch.full((3,), value)
        guard.before_step(weight.grad.norm(), step)
        optimizer.step()
        state = optimizer.state[weight]
        states.append(
            [
                float(t.detach().sum())
                for t in (weight, state["exp_avg"], state["exp_avg_sq"], state["step"])
            ]
        )
    assert states[0] == states[1] == states[2] != states[3]
    assert guard.look() == Skipped(steps=2, first=2, last=3, in_a_row=2)
    assert guard.look() == Skipped(0, 0, 0, 0)


def test_after_the_first_bad_step_nothing_changes_until_it_is_looked_at():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    guard = Guard(optimizer, scaled=False, stop_at_first=True, device=torch.device("cpu"))
    for step, value in enumerate([math.nan, 1.0, 1.0], 1):
        weight.grad = torch.full((3,), value)
        guard.before_step(weight.grad.norm(), step)
        optimizer.step()
    assert torch.equal(weight, torch.ones(3))
    with pytest.raises(UserError, match="the gradient of step 1 is not finite: traced 1"):
        require_finite(
            guard.look(), 50, stop_at_first=True, scaled=False, trace=lambda step: f"traced {step}"
        )
