"""Tasks: samples are what they are said to be, the same for everyone, and can be learned."""

import json

import numpy as np
import pytest
from runs import assert_same, read_lines, read_losses

from mixer.commands.eval import main as eval_command
from mixer.common.errors import UserError
from mixer.data.config import DataConfig
from mixer.evaluation.config import EvalOptions, check_options
from mixer.objectives.tasks import SAMPLES, TaskSamples, open_task

KEYED = {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 16}
KEYED |= {"num_mixer_heads": 4, "mixer_key_size": 16, "final_norm": True}
KEYED |= {"mixing_weight": "lags", "mixing_init": "shift"}


def samples_of(task: str, context: int, split: str = "train", **options) -> TaskSamples:
    return TaskSamples(DataConfig(source=task, **{"vocab_size": 300} | options), split, context)


@pytest.mark.parametrize("context", [3, 15, 16, 64])
def test_a_copy_repeats_its_first_half_after_a_separator(context):
    inputs, targets = samples_of("copy", context).batch([0, 7, 2**32 - 1])
    half = context // 2
    for row, scored in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert all(0 < token < 300 for token in row[:half]) and row[half] == 0
        assert scored == [-100] * half + row[:half] + [-100] * (context % 2)
        assert row[half + 1 : 2 * half] == row[: half - 1]


@pytest.mark.parametrize(
    "task, split, context, pairs, asked",
    [
        ("recall", "train", 15, 0, 4),
        ("recall", "train", 64, 5, 5),
        ("recall", "validation", 63, 16, 16),
        ("needle", "train", 40, 9, 9),
        ("needle", "validation", 40, 9, 1),
    ],
)
def test_recall_asks_for_each_key_once_and_its_value_stands_behind_it(
    task, split, context, pairs, asked
):
    inputs, targets = samples_of(task, context, split, pairs=pairs).batch(range(300))
    places = []
    for row, scored in zip(inputs.tolist(), targets.tolist(), strict=True):
        body, answered = row[: context + 1 - 2 * asked], []
        for place, answer in enumerate(scored):
            if answer != -100:
                key = row[place]
                assert key <= 149 and body.count(key) == 1  # the only place that tells the answer
                assert body[body.index(key) + 1] == answer >= 150
                answered.append(key)
                places.append(body.index(key))
        assert len(set(answered)) == asked and scored[-1] != -100
        assert sum(token <= 149 for token in body) == asked
    assert len(set(places)) == (context + 1 - 2 * asked) // 2, "pairs may stand anywhere"


@pytest.mark.parametrize("task", ["copy", "recall", "needle"])
def test_a_sample_depends_on_its_index_alone_and_none_is_held_out_and_trained_on(task):
    training, held_out = (samples_of(task, 32, split) for split in SAMPLES)
    indices = np.random.default_rng(0).integers(0, len(training), 200)
    inputs, targets = training.batch(indices)
    for place in (3, 100, 199):  # whatever else is in the batch
        one, answers = training.batch(indices[place : place + 1])
        assert (one[0] == inputs[place]).all() and (answers[0] == targets[place]).all()
    held = held_out.batch(range(len(held_out)))[0]
    assert len({tuple(row) for row in [*inputs.tolist(), *held.tolist()]}) == 200 + len(held_out)
    tokens = inputs[:, :8].numpy()  # spread over the vocabulary
    drawn = tokens if task == "copy" else tokens[tokens >= 150] - 150
    assert abs(drawn.mean() - (150 if task == "copy" else 75)) < 6


def test_the_samples_of_all_versions_are_the_same():
    found = [samples_of(task, 8).batch([5])[0][0].tolist() for task in ("copy", "recall")]
    assert found == [[84, 17, 48, 187, 0, 84, 17, 48], [62, 232, 45, 250, 290, 62, 232, 45]]
    task = open_task(DataConfig(source="recall", vocab_size=300), 24)
    assert task.manifest.fingerprint.startswith("1dcf715c18e6455d")
    assert task.tokenizer.decode([17]) == "17"


def test_what_does_not_fit_is_refused():
    for task, context, options in (
        ("copy", 2, {}),
        ("recall", 63, {"pairs": 17}),
        ("needle", 2, {}),
        ("recall", 999, {"pairs": 150}),
    ):
        with pytest.raises(UserError, match=f"data.source = {task}"):
            samples_of(task, context, **options)


@pytest.fixture
def write_task(write_config):
    """Writes the configuration of a tiny keyed mixer on a task."""

    def write(**data):
        return write_config(
            model=KEYED,
            # As in a configuration for text, of which a task reads nothing.
            data={"path": "nowhere", "vocab_size": 257, "directory": "nowhere"} | data,
            train={"steps": 60, "batch_size": 32, "eval_every": 30, "eval_samples": 64},
            optim={"name": "muon", "lr": 1e-2, "warmup_steps": 10},
            checkpoint={"save_every": 30},
            logging={"log_every": 1},
        )

    return write


def test_a_tiny_keyed_mixer_learns_to_copy_goes_on_to_the_bit_and_is_evaluated(
    write_task, launch, tmp_path, monkeypatch, capsys
):
    path, runs = write_task(source="copy"), tmp_path / "runs"
    launch("--config", path, "name=whole").succeed()
    lines = [line for line in read_lines(runs / "whole") if "validation_loss" in line]
    right = [line["validation_accuracy"] for line in lines]
    assert len(right) == 3 and right[0] < 0.05 and right[-1] > 0.9, right
    assert lines[-1]["validation_tokens"] == 64 * 8
    assert "validation_bits_per_byte" not in lines[-1]  # random tokens stand for no text

    cut, metrics = launch("--config", path, "name=cut"), runs / "cut/metrics.jsonl"
    cut.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 40).kill()
    launch("--config", path, "name=cut").succeed()
    assert_same(runs / "cut", runs / "whole", 60)

    monkeypatch.chdir(tmp_path)  # the task is read from the checkpoint alone
    eval_command(["--checkpoint", str(runs / "whole/step-60"), "--device", "cpu"])
    (result,) = json.loads((runs / "whole/eval-step-60/report.json").read_text())
    assert result["tokens_scored"] == 2048 * 8
    assert result["accuracy"] == pytest.approx(right[-1], abs=0.05)
    assert result["loss"] == pytest.approx(lines[-1]["validation_loss"], rel=0.5)
    assert "| accuracy |" in capsys.readouterr().out
    with pytest.raises(UserError, match="--max-tokens is given, which scoring samples does not"):
        check_options(EvalOptions(checkpoint=str(runs / "whole/step-60"), max_tokens=5))


def test_several_processes_train_on_the_samples_of_one(write_task, launch, tmp_path):
    path, steps = write_task(source="recall", pairs=2), ["train.steps=5", "optim.warmup_steps=1"]
    launch("--config", path, "name=one", *steps).succeed()
    launch("--config", path, "name=two", *steps, "train.batch_size=16", processes=2).succeed()
    one, two = (read_losses(tmp_path / "runs" / name) for name in ("one", "two"))
    assert len(one) == 5 and two == pytest.approx(one, rel=1e-5)
    refused = launch("--config", path, "name=one", *steps, "data.pairs=3")
    assert 0 not in refused.wait() and "data.pairs is 2 in the checkpoint, now 3" in refused.output
