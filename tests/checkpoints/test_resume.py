"""Resuming: stopped or killed at any moment, a run ends with the weights of one that nobody
disturbed, to the last bit.
"""

import json
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import evaluate, list_files
from launching import ROOT, Launch, run_python
from runs import FSDP, RECIPE, assert_same, read_lines, read_losses
from safetensors.torch import load_file

from mixer.checkpoints.checkpoint import find_resume
from mixer.common.errors import UserError
from mixer.training.config import load_config
from mixer.training.loop import train

KILLS = int(os.environ.get("MIXER_SOAK_KILLS", "2"))


@pytest.mark.parametrize(
    ("settings", "processes"), [((), 1), (RECIPE, 2)], ids=["adamw-1", "recipe-2"]
)
def test_a_run_killed_at_random_ends_as_an_undisturbed_one(
    write_config, launch, tmp_path, settings, processes
):
    kills = max(1, KILLS // 2)  # each case has its share
    # Steps are quick and saves frequent, so that kills fall into start-up, steps, saves and
    # evaluations alike.
    steps = 60 * kills
    train_section = {"steps": steps, "batch_size": 4, "eval_every": 50, "eval_samples": 16}
    config = write_config(train=train_section, checkpoint={"save_every": 5})
    command = ("--config", config, *settings)
    launch(*command, "name=undisturbed", processes=processes).succeed(patience=120 * kills)
    generator, killed = random.Random(2), tmp_path / "runs/killed"
    for kill in range(kills):
        ranks = launch(*command, "name=killed", processes=processes)
        _wait_for_news(ranks, killed / "metrics.jsonl", patience=generator.uniform(0.5, 10))
        time.sleep(generator.uniform(0, 0.3))
        assert ranks.running(), f"the run ended before kill {kill + 1}: {ranks.output}"
        ranks.kill()
    launch(*command, "name=killed", processes=processes).succeed(patience=120 * kills)
    assert_same(killed, tmp_path / "runs/undisturbed", steps)
    state = load_file(killed / f"step-{steps}/trainer_state/optimizer-1-of-1.safetensors")
    moments = {name.rpartition("/")[2] for name in state}
    assert moments == {"exp_avg", "exp_avg_sq", "step"} | ({"momentum"} if settings else set())


def _wait_for_news(ranks: Launch, metrics: Path, patience: float) -> None:
    """Until the run has written to its metrics, or `patience` seconds have passed (then the kill
    hits the start-up).
    """
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and ranks.running():
        is_new = metrics.exists() and metrics.stat().st_mtime_ns != before
        if is_new and metrics.read_text().count("\n") > 3:
            return
        time.sleep(0.02)


# The steps whose mean loss a line of metrics has, by its own step: 12 steps, a line every 5.
LOGGED = {5: slice(0, 5), 10: slice(5, 10), 12: slice(10, 12)}


def test_each_resume_is_as_exact_as_the_first_and_loses_no_step_of_a_logged_mean(
    write_config, small_run, launch, tmp_path
):
    """Rows are padded, so that steps have unequal numbers of tokens."""
    data = small_run["data"] | {"directory": str(tmp_path / "rows"), "packed": False}
    config = write_config(data=data)
    launch("--config", config, "name=each").succeed()
    options = ["train.batch_size=4", "logging.log_every=5"]
    launch("--config", config, "name=whole", *options, processes=2).succeed()
    for stop_at in (3, 6, 10, 12):  # three resumes, at steps with and without an evaluation
        arguments = ("--config", config, "name=parts", *options, f"checkpoint.save_every={stop_at}")
        ranks = launch(*arguments, processes=2)
        if stop_at < 12:
            ranks.until((tmp_path / f"runs/parts/step-{stop_at}").exists).kill()
        else:
            ranks.succeed()
    assert_same(tmp_path / "runs/parts", tmp_path / "runs/whole", 12)
    lines = [line for line in read_lines(tmp_path / "runs/each") if "loss" in line]
    tokens = np.diff([0, *(line["tokens"] for line in lines)])
    nats = np.array([line["loss"] for line in lines]) * tokens
    means = {end: nats[steps].sum() / tokens[steps].sum() for end, steps in LOGGED.items()}
    assert read_losses(tmp_path / "runs/whole") == pytest.approx(means, rel=1e-5)


def test_other_processes_batch_size_and_fsdp_go_on_with_the_same_samples(
    write_config, launch, tmp_path
):
    # parameters outside of blocks
    model = ("--config", write_config(), "model.suffix_match=3", "optim.name=muon")
    launch(*model, "name=one").succeed()
    # processes, batch_size, accumulation: always 8 samples a step
    changes = [(1, 4, 2, {}), (2, 2, 2, FSDP), (4, 2, 1, {}), (2, 1, 4, {})]
    for number, (processes, batch, accumulation, environment) in enumerate(changes):
        options = [f"train.batch_size={batch}", f"train.gradient_accumulation_steps={accumulation}"]
        last = 3 * (number + 1)  # with the schedule of 12 steps, stopped by a kill after a save
        options += [f"checkpoint.save_every={last}", "name=many"]
        how = {"processes": processes, "environment": environment}
        ranks = launch(*model, *options, **how)
        if number < 3:
            ranks.until((tmp_path / f"runs/many/step-{last}").exists).kill()
        else:
            ranks.succeed()
    one, many = (read_losses(tmp_path / "runs" / name) for name in ("one", "many"))
    assert many == pytest.approx(one, rel=1e-5)


def test_a_run_killed_before_its_first_checkpoint_has_its_first_evaluation_once(
    write_config, launch, tmp_path
):
    train = {"steps": 12, "batch_size": 8, "eval_every": 100_000, "eval_samples": 8}
    config = write_config(train=train)
    metrics = tmp_path / "runs/small/metrics.jsonl"
    ranks = launch("--config", config, "train.steps=100000", "checkpoint.save_every=0")
    ranks.until(lambda: metrics.exists() and '"step": 3,' in metrics.read_text()).kill()
    launch("--config", config).succeed()
    lines = read_lines(tmp_path / "runs/small")
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 12]


def test_a_run_goes_on_from_a_named_checkpoint_with_more_steps(
    write_config, finished, launch, tmp_path
):
    (finished / "best").unlink()
    (finished / "best").symlink_to("step-8")
    changes = [f"checkpoint.resume={finished / 'best'}", "name=longer"]
    changes += ["train.steps=14", "train.batch_size=4"]
    with pytest.raises(UserError, match="small is a run, not a checkpoint: give .*step-12"):
        find_resume(tmp_path / "runs/longer", str(finished))
    output = launch("--config", write_config(), *changes, processes=2).succeed()
    assert "step 14/14" in output
    losses, original = read_losses(tmp_path / "runs/longer"), read_losses(finished)
    assert list(losses) == list(range(9, 15))
    # the same samples, on twice the processes
    assert losses[9] == pytest.approx(original[9], rel=1e-5)
    trainer = json.loads((tmp_path / "runs/longer/step-14/trainer_state/trainer.json").read_text())
    assert (trainer["step"], trainer["samples"]) == (14, 14 * 8)
    # the same command again goes on, it does not begin again
    changes[-2:] = ["train.steps=16"]
    output = launch("--config", write_config(), *changes, "train.batch_size=8").succeed()
    assert f"continuing from these, not from {finished / 'best'}" in output
    assert "step 13/16" not in output
    assert list(read_losses(tmp_path / "runs/longer")) == list(range(9, 17))


def test_a_run_of_an_earlier_version_has_the_losses_it_had_there(tmp_path, monkeypatch):
    before = shutil.copytree(Path(__file__).parent / "written_before", tmp_path / "before")
    monkeypatch.chdir(before)
    result = evaluate("runs/small/step-4")
    assert result["nats"] == pytest.approx(7313.401684761047)  # that version's eval.py
    expected = read_losses(before / "runs/small")
    config = before / "runs/small/config.yaml"
    command = (ROOT / "train.py", "--config", config)
    printed = run_python(*command, output=before / "printed", directory=before)
    assert "resuming runs/small/step-4" in printed
    assert read_losses(before / "runs/small") == pytest.approx(expected, rel=0, abs=1e-4)


def test_a_run_of_version_0_2_0_goes_on_with_the_backend_that_auto_stood_for(
    write_config, finished, capsys
):
    """On some GPUs that was plain PyTorch, although our kernels run there."""
    file = finished / "step-12/trainer_state/trainer.json"
    mixing = {"backend": "dense", "keyed_backend": "cuda"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mixing": mixing}))
    list_files(finished / "step-12")
    model = train(load_config(str(write_config()), ["train.steps=13"]))
    assert "mixing: auto uses dense, as the run did before" in capsys.readouterr().out
    assert {layer.backend for layer in model.modules() if hasattr(layer, "backend")} == {"dense"}
    later = finished / "step-13/trainer_state/trainer.json"
    assert json.loads(later.read_text())["mixing"] == mixing
    train(load_config(str(write_config()), ["train.steps=14", "model.mixing_backend=dense"]))
    later = finished / "step-14/trainer_state/trainer.json"  # which chose for itself
    assert json.loads(later.read_text())["mixing"] == {}


def test_a_copied_run_whose_links_were_followed_goes_on_and_links_its_best_checkpoint(
    write_config, finished, capsys
):
    """As `cp -rL`, `scp -r` and object storage do. The best checkpoint stays, though it is old."""
    metrics = finished / "metrics.jsonl"
    lines = read_lines(finished)
    for line in lines:
        if line["step"] == 12 and "validation_loss" in line:
            line["validation_loss"] = 0.1
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (finished / "best").unlink()
    shutil.copytree(finished / "step-8", finished / "best")  # perhaps of another time
    (finished / "best.partial").mkdir()
    options = ["train.steps=24", "checkpoint.save_every=3", "train.eval_every=0"]
    train(load_config(str(write_config()), options))
    said = f"{finished}/best was a folder, and is {finished}/best-copy-1 now"
    assert capsys.readouterr().out.count(said) == 1
    assert os.readlink(finished / "best") == "step-12"
    names = {path.name for path in finished.glob("*")} - {"config.yaml", "metrics.jsonl"}
    assert names == {"best", "best-copy-1", "step-12", "step-21", "step-24"}
