"""Resuming: killed at any moment, a run ends with the weights of one that nobody disturbed, to the last bit."""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import read_losses, run, start
from safetensors.torch import load_file

from mixer.checkpoint import incomplete
from mixer.config import load_config
from mixer.errors import UserError
from mixer.loop import train

KILLS = int(os.environ.get("MIXER_SOAK_KILLS", "3"))


def final_weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def kill_tree(process) -> None:
    """SIGKILL to the launcher and all it started; torchrun's workers are sessions of their own and would outlive it."""
    parent = psutil.Process(process.pid)
    for victim in [*parent.children(recursive=True), parent]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


def lines(directory: Path) -> list[tuple]:
    """What metrics.jsonl says of each step, without the times."""
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line.get(key) for key in ("step", "tokens", "loss", "grad_norm", "lr", "validation_loss")) for line in found]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_killed_at_random_ends_with_the_same_weights(write_config, tmp_path, processes):
    # Steps are quick and saves frequent, so that kills fall into preparation, steps, saves, evaluations and start-up alike.
    steps = 100 * KILLS
    train_section = {"steps": steps, "batch_size": 8 // processes, "eval_every": 50, "eval_samples": 16}
    config = write_config(train=train_section, checkpoint={"save_every": 5})
    run("--config", config, "name=undisturbed", processes=processes)
    generator = random.Random(processes)
    killed = 0
    while killed < KILLS:
        process = start("--config", config, "name=killed", processes=processes)
        _wait_for_news(process, tmp_path / "runs/killed/metrics.jsonl", patience=generator.uniform(4, 20))
        time.sleep(generator.uniform(0, 0.5))
        if process.poll() is not None:
            pytest.fail(f"the run ended before kill {killed + 1}: {process.communicate()[0]}")
        kill_tree(process)
        killed += 1
    run("--config", config, "name=killed", processes=processes)
    undisturbed, again = tmp_path / "runs/undisturbed", tmp_path / "runs/killed"
    assert final_weights(again / f"step-{steps}") == final_weights(undisturbed / f"step-{steps}")
    assert lines(again) == lines(undisturbed)  # none doubled, missing or different
    assert not list(again.glob("*.partial"))


def _wait_for_news(process, metrics: Path, patience: float) -> None:
    """Until the process has written to its metrics, or `patience` seconds have passed (then the kill hits the start-up)."""
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and process.poll() is None:
        lines = metrics.read_text().count("\n") if metrics.exists() else 0
        if lines and metrics.stat().st_mtime_ns != before and lines > 3:
            return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished_once(small_run, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("finished")
    (directory / "config.yaml").write_text(yaml.safe_dump(small_run | {"output_dir": str(directory)}))
    run("--config", directory / "config.yaml")
    return directory / "small"


@pytest.fixture
def finished(finished_once, tmp_path) -> Path:
    """A run of 12 steps, to change at will."""
    return shutil.copytree(finished_once, tmp_path / "runs/small", symlinks=True)


def test_damaged_checkpoints_are_passed_over_named_and_refused(write_config, finished, tmp_path):
    reference = final_weights(finished / "step-12")
    weights = finished / "step-12/model.safetensors"
    os.truncate(weights, 1000)
    assert "model.safetensors has 1000 bytes" in incomplete(finished / "step-12")
    output = run("--config", write_config())
    assert "passing over" in output and f"resuming {finished / 'step-8'}" in output
    assert final_weights(finished / "step-12") == reference

    (finished / "step-8/trainer_state/optimizer.pt").unlink()
    with pytest.raises(UserError, match="optimizer.pt is missing; give another one"):
        train(load_config(str(write_config()), [f"checkpoint.resume={finished / 'step-8'}"]))


def test_changed_model_or_data_and_fresh_starts_over_old_checkpoints_are_refused(write_config, small_run, finished, tmp_path):
    config = str(write_config())
    with pytest.raises(UserError, match="hidden_size is 32 in the checkpoint and 64 in the configuration"):
        train(load_config(config, ["model.hidden_size=64"]))
    with pytest.raises(UserError, match="was trained on other data"):
        train(load_config(config, [f"data.directory={tmp_path / 'other'}", "data.max_documents=20"]))
    with pytest.raises(UserError, match="set checkpoint.resume=auto"):
        train(load_config(config, ["checkpoint.resume=never"]))


def test_a_run_goes_on_from_a_named_checkpoint_with_more_steps_and_another_batch(write_config, finished, tmp_path):
    changes = [f"checkpoint.resume={finished / 'step-8'}", "name=longer", "train.steps=14", "train.batch_size=4"]
    output = run("--config", write_config(), *changes, processes=2)
    assert "step 14/14" in output
    losses, original = read_losses(tmp_path / "runs/longer"), read_losses(finished)
    assert list(losses) == list(range(9, 15))
    assert losses[9] == pytest.approx(original[9], rel=1e-5)  # the same samples, on twice the processes
    trainer = json.loads((tmp_path / "runs/longer/step-14/trainer_state/trainer.json").read_text())
    assert (trainer["step"], trainer["samples"]) == (14, 14 * 8)


def test_a_run_that_is_being_trained_is_not_trained_twice(write_config, tmp_path):
    config = write_config(train={"steps": 100_000, "batch_size": 8, "eval_every": 0})
    process = start("--config", config)
    metrics = tmp_path / "runs/small/metrics.jsonl"
    while not metrics.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    with pytest.raises(UserError, match="is being trained by another process"):
        train(load_config(str(config), []))
    kill_tree(process)


def test_a_checkpoint_loads_alone_in_fp32(finished, tmp_path):
    moved = shutil.copytree(finished / "step-12", tmp_path / "moved")
    shutil.rmtree(moved / "trainer_state")  # what from_pretrained needs is outside of it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(moved), AutoTokenizer.from_pretrained(moved)
    assert all(str(t.dtype) == "torch.float32" for t in load_file(moved / "model.safetensors").values())
    text = tokenizer.decode(model.generate(tokenizer("def ", return_tensors="pt").input_ids, max_new_tokens=5)[0])
    assert text.startswith("def ")
