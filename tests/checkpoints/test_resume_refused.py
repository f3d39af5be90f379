"""What a resume refuses, naming each difference. What trained a run stays on record, whatever it is
started with again.
"""

import shutil

import pytest
import yaml
from runs import read_lines, refusal, state_files

from mixer.checkpoints.export import export
from mixer.training.config import load_config


def test_a_changed_model_is_refused_naming_each_field_and_its_key(write_config, finished):
    said = refusal(write_config(), "model.hidden_size=64", "model.final_norm=true")
    assert "final_norm is False in the checkpoint, now True; " in said
    assert "hidden_size is 32 in the checkpoint, now 64; " in said and "; restore" in said


def test_changed_data_is_refused_naming_what_differs(write_config, finished, tmp_path):
    other = f"data.directory={tmp_path / 'other'}", "data.max_documents=20", "seed=5"
    said = refusal(write_config(), *other)
    assert "different data or in another order" in said
    assert "data.max_documents is 30 in the checkpoint, now 20" in said
    assert "seed is 0 in the checkpoint, now 5" in said
    assert "tokenizer is '" in said and "train.bin is '" in said
    assert f"train.init_from={finished / 'step-12'}" in said


def test_going_back_below_newer_checkpoints_is_refused(write_config, finished):
    said = refusal(write_config(), f"checkpoint.resume={finished / 'step-8'}")
    assert "the run has newer ones" in said and "step-12; delete these, or choose" in said


def test_a_refused_resume_leaves_no_run_directory(write_config, tmp_path):
    nothing = f"checkpoint.resume={tmp_path / 'no/checkpoint'}"
    assert "no/checkpoint: there is no such directory" in refusal(write_config(), nothing)
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs/small").mkdir(parents=True)  # of the user's own
    assert "no/checkpoint: there is no such directory" in refusal(write_config(), nothing)
    assert (tmp_path / "runs/small").is_dir()


def test_a_run_that_is_being_trained_is_not_trained_twice(write_config, launch, tmp_path):
    config = write_config(train={"steps": 100_000, "batch_size": 8, "eval_every": 0})
    launch("--config", config).until((tmp_path / "runs/small/metrics.jsonl").exists)
    assert "is being trained by another process" in refusal(config)


def test_another_optimizer_is_refused_naming_its_key_and_the_checkpoints_value(
    write_config, finished
):
    before = state_files(finished)
    said = refusal(write_config(), "optim.name=muon", "train.steps=20")
    assert "state of another optimizer: optim.name = muon (was adamw); restore it" in said
    assert state_files(finished) == before


def test_other_settings_for_a_finished_run_are_named_refused_and_recorded_nowhere(
    write_config, finished
):
    before = state_files(finished)
    for change, named in (("optim.lr=0.5", "optim.lr = 0.5"), ("train.batch_size=3", "size = 3")):
        said = refusal(write_config(), change, "train.steps=11")
        assert "has 12 steps, which were trained with other" in said
        assert f"{named} (was " in said and "choose another name" in said
        assert state_files(finished) == before


def test_the_card_and_the_configuration_of_a_run_say_what_each_step_was_trained_with(
    write_config, finished, launch, tmp_path
):
    config = write_config()
    changes = ["optim.lr=0.01", "train.steps=14", "logging.log_every=2"]
    last = [line["lr"] for line in read_lines(finished) if "lr" in line][-1]
    output = launch("--config", config, *changes, "data.subset=").succeed()
    changed = "train.steps = 14 (was 12), optim.lr = 0.01 (was 0.002)"
    assert f"settings from step 13 on: {changed}" in output
    assert f"the learning rate jumps from {last:.3g} to" in output
    earlier = "Until step 12: train.steps = 12, optim.lr = 0.002"
    assert f"# {earlier}\n" in (finished / "config.yaml").read_text()
    assert load_config(str(finished / "config.yaml"), []).optim.lr == 0.01
    cards = {}
    for step in (12, 14):
        export(finished / f"step-{step}", tmp_path / str(step), "apache-2.0")
        cards[step] = (tmp_path / str(step) / "README.md").read_text()
    assert earlier in cards[14] and "Until" not in cards[12]
    rates = {
        step: yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])["optim"]["lr"]
        for step, card in cards.items()
    }
    assert rates == {12: 0.002, 14: 0.01}


def test_a_rate_that_jumps_where_a_run_is_made_longer_is_said_with_what_avoids_it(
    write_config, finished, launch, tmp_path
):
    config = write_config()
    copy = shutil.copytree(finished, tmp_path / "runs/copy", symlinks=True)
    longer = ("--config", config, "train.steps=100", "train.eval_every=0", "checkpoint.keep=9")
    ranks = launch(*longer, "checkpoint.save_every=13")
    ranks.until((tmp_path / "runs/small/step-13").exists).kill()
    lines = read_lines(tmp_path / "runs/small")
    rates = {line["step"]: line["lr"] for line in lines if "lr" in line}
    last, now = rates[12], rates[13]
    assert f"the learning rate jumps from {last:.3g} to {now:.3g}" in ranks.output
    advice = ranks.output.partition("To continue at the old rate set ")[2].partition(";")[0].split()
    output = launch("--config", config, "train.steps=14", "name=copy", *advice).succeed()
    assert "the learning rate jumps" not in output
    assert read_lines(copy)[-2]["lr"] == pytest.approx(last, rel=0.01)


def test_nothing_that_was_not_read_is_recorded(write_config, launch, tmp_path):
    """A recipe's text is replaced by another one, and keeps its other options."""
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / f"texts/{number}.txt").write_text(f"A book of {number} words and more. " * 9)
    data = {"source": "hub", "path": "ann/rows", "subset": "sample-10BT", "split": "train_sft"}
    data |= {"text_field": "content", "vocab_size": 300, "validation_fraction": 0.2}
    own = ["data.source=text", f"data.path={tmp_path / 'texts'}", f"data.directory={tmp_path}/d"]
    launch("--config", write_config(data=data), *own, "train.steps=3").succeed()
    run = tmp_path / "runs/small"
    export(run / "step-3", tmp_path / "exported", "apache-2.0")
    written = [run / "config.yaml", run / "step-3/trainer_state/trainer.json"]
    written += [tmp_path / "d/manifest.json", tmp_path / "exported/README.md"]
    for file in written:
        for word in ("sample-10BT", "train_sft", "content", "ann/rows"):
            assert word not in file.read_text(), file
    assert load_config(str(run / "config.yaml"), []).data.vocab_size == 300
