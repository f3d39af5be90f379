"""What a resume refuses, naming each difference, and what it leaves as it is."""

import pytest
from runs import RECIPE, state_files

from mixer.common.errors import UserError
from mixer.training.config import load_config
from mixer.training.loop import train


def test_a_changed_model_is_refused_naming_each_field_and_its_key(write_config, finished):
    with pytest.raises(
        UserError,
        match=r"final_norm is False in .*; hidden_size is 32 in the checkpoint, now 64; .*set",
    ):
        train(load_config(str(write_config()), ["model.hidden_size=64", "model.final_norm=true"]))


def test_changed_data_is_refused_naming_what_differs(write_config, finished, tmp_path):
    other = [f"data.directory={tmp_path / 'other'}", "data.max_documents=20", "seed=5"]
    with pytest.raises(
        UserError,
        match=r"other data or in another"
        r".*data.max_documents is 30 in the checkpoint, now 20.*seed is 0 in the checkpoint, now 5"
        r".*tokenizer is SHA-256",
    ) as error:
        train(load_config(str(write_config()), other))
    assert "train.bin is SHA-256" in str(error.value)
    assert f"train.init_from={finished / 'step-12'}" in str(error.value)


def test_going_back_below_newer_checkpoints_is_refused(write_config, finished):
    config = str(write_config())
    with pytest.raises(
        UserError, match="the run has newer ones.*step-12.*delete these, or choose another name"
    ):
        train(load_config(config, [f"checkpoint.resume={finished / 'step-8'}"]))


def test_a_refused_resume_leaves_no_run_directory(write_config, tmp_path):
    config, nothing = str(write_config()), tmp_path / "no/checkpoint"
    with pytest.raises(UserError, match="checkpoint .* cannot be used"):
        train(load_config(config, [f"checkpoint.resume={nothing}"]))
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs/small").mkdir(parents=True)  # of the user's own
    with pytest.raises(UserError, match="checkpoint .* cannot be used"):
        train(load_config(config, [f"checkpoint.resume={nothing}"]))
    assert (tmp_path / "runs/small").is_dir()


def test_a_run_that_is_being_trained_is_not_trained_twice(write_config, launch, tmp_path):
    config = write_config(train={"steps": 100_000, "batch_size": 8, "eval_every": 0})
    launch("--config", config).until((tmp_path / "runs/small/metrics.jsonl").exists)
    with pytest.raises(UserError, match="is being trained by another process"):
        train(load_config(str(config), []))


@pytest.mark.parametrize(
    ("written_with", "resumed_with", "named"),
    [
        ([], ["optim.name=muon"], r"optim.name = muon \(was adamw\)"),
        (RECIPE, ["optim.shared_lags=false"], r"optim.shared_lags = False \(was True\)"),
    ],
)
def test_another_optimizer_is_refused_naming_its_key_and_the_checkpoints_value(
    write_config, tmp_path, written_with, resumed_with, named
):
    config = str(write_config())
    short = ["train.steps=3", "train.eval_every=0", "train.eval_samples=8"]
    train(load_config(config, [*written_with, *short]))
    before = state_files(tmp_path / "runs")
    with pytest.raises(UserError, match=f"state of another optimizer: .*{named}.*; set that"):
        train(load_config(config, [*written_with, *resumed_with]))
    assert state_files(tmp_path / "runs") == before
