"""A plan of runs: each trains once, by the trainer, as the plan says."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml
from launching import run_python, start_python

from mixer.common.yaml_file import read_yaml
from mixer.training.config import load_config, override

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "recipe.py"


def options(run: dict, *sections: str) -> dict:
    return {f"{part}.{key}": value for part in sections for key, value in run[part].items()}


def test_a_plan_goes_on_where_it_was_and_a_run_with_other_options_is_made_anew(small_run, tmp_path):
    common = options(small_run, "model", "data", "train", "optim", "logging")
    own = {"recipe": str(ROOT / "configs/recipe.yaml"), "optim.warmup_steps": 3}
    plan = {"reference": "paper", "common": common, "runs": {"paper": {}, "recipe": own}}
    file, output = tmp_path / "plan.yaml", tmp_path / "results"
    printed = tmp_path / "printed"

    def train(*options) -> tuple[int, dict]:
        file.write_text(yaml.safe_dump(plan, sort_keys=False))
        given = [SCRIPT, file, "--output", output, "--commit", "abc", *options]
        done = run_python(*given, output=printed)
        made = output.with_suffix(".json")
        return done.returncode, json.loads(made.read_text())["runs"] if made.exists() else {}

    assert train("--seconds", "1") == (3, {}), "no run has the time, not even the first"
    status, first = train("--only", "paper")
    assert status == 0 and list(first) == ["paper"]
    status, second = train("--seconds", "1")
    assert status == 3 and second == first, "a run was begun that has no time"
    status, third = train()
    assert status == 0 and list(third) == ["paper", "recipe"] and third["paper"] == first["paper"]
    settings, losses = third["recipe"]["settings"], dict(third["recipe"]["loss"])
    assert settings["optim.name"] == "muon" and settings["model.mixing_init"] == "zero"
    assert losses[1] != dict(first["paper"]["loss"])[1], "another initial model has another loss"
    assert output.with_suffix(".png").stat().st_size > 0

    for mistake in (["--only", "papre"], ["train.steps"]):
        status, kept = train(*mistake)
        assert status == 2 and kept == third and "Traceback" not in printed.read_text()
    status, kept = train("--only", "paper", "data.path=none.txt", "data.source=text")
    assert status == 2 and kept == third, "an error that is no divergence is no result"
    assert "Choose another data.directory" in printed.read_text()
    own["train.steps"] = 6
    plan["runs"]["diverged"] = {"optim.lr": 1e18, "train.non_finite": "skip"}
    status, fourth = train()
    assert "not finite" in fourth.pop("diverged")["failure"]
    assert "failed: after the last step" in output.with_suffix(".md").read_text()
    assert status == 0 and fourth["paper"] == first["paper"] and fourth["recipe"]["steps"] == 6


def test_a_signal_ends_the_command_and_the_run_that_it_stops_is_no_result(small_run, tmp_path):
    common = options(small_run, "model", "data", "train", "optim")
    long = {"train.steps": 100_000, "train.eval_every": 0}
    plan = {"common": common | {"logging.log_every": 1}, "runs": {"first": {}, "long": long}}
    plan["runs"]["next"] = {}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    output, printed = tmp_path / "results", tmp_path / "printed"
    given = (SCRIPT, tmp_path / "plan.yaml", "--output", output, "--commit", "abc")
    command = start_python(*given, output=printed)
    while not (printed.exists() and "/100000: loss" in printed.read_text()):
        assert command.is_alive(), printed.read_text()
        time.sleep(0.05)
    os.kill(command.pid, signal.SIGTERM)
    command.join(60)
    assert command.exitcode == 3
    assert list(json.loads(output.with_suffix(".json").read_text())["runs"]) == ["first"]
    assert "| first |" in output.with_suffix(".md").read_text()
    assert "left after a signal: long, next" in printed.read_text()


SIGNAL_IN_THE_LAST_EVALUATION = f"""
import runpy, signal, sys
from mixer.training.loop import Trainer

evaluate = Trainer.evaluate

def interrupted(trainer):
    evaluate(trainer)
    if trainer.progress.step == trainer.run.train.steps:
        signal.raise_signal(signal.SIGTERM)

Trainer.evaluate = interrupted
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_a_signal_after_the_last_step_ends_the_command_and_the_run_is_a_result(small_run, tmp_path):
    common = options(small_run, "model", "data", "train", "optim")
    plan = {"common": common, "runs": {"first": {}, "next": {"seed": 1}, "last": {"seed": 2}}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    script, output = tmp_path / "interrupted.py", tmp_path / "results"
    script.write_text(SIGNAL_IN_THE_LAST_EVALUATION)
    given = (script, tmp_path / "plan.yaml", "--output", output, "--commit", "abc")
    done = run_python(*given, output=tmp_path / "printed")
    assert done.returncode == 3 and "left after a signal: next, last" in done.stdout
    assert list(json.loads(output.with_suffix(".json").read_text())["runs"]) == ["first"]


def test_runs_on_another_text_under_the_same_name_are_refused(small_run, tmp_path):
    text = tmp_path / "text"
    common = options(small_run, "model", "train", "optim")
    common |= {"data.source": "text", "data.path": str(text), "data.vocab_size": 300}
    common |= {"data.validation_fraction": 0.5}
    diverges = {"optim.lr": 1e18, "train.non_finite": "skip"}
    plan = {"common": common, "runs": {"first": {}, "second": {"seed": 1}, "diverges": diverges}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    output, printed = tmp_path / "results", tmp_path / "printed"

    def train(word: str, *options) -> int:
        text.mkdir(exist_ok=True)
        for number in range(8):
            (text / f"{number}.txt").write_text(f"{word} {number} " * 400)
        prepared = f"data.directory={tmp_path / 'data'}"
        given = (SCRIPT, tmp_path / "plan.yaml", "--output", output, "--commit", "abc", prepared)
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        return run_python(*given, *options, output=printed).returncode

    assert train("one", "--only", "first") == 0
    for name in ("second", "diverges"):
        assert train("two", "--only", name) == 2
        assert "the text has changed" in printed.read_text()
        assert list(json.loads(output.with_suffix(".json").read_text())["runs"]) == ["first"]
        printed.unlink()
    assert train("one") == 0
    assert list(json.loads(output.with_suffix(".json").read_text())["runs"]) == list(plan["runs"])


@pytest.mark.parametrize("plan", sorted((ROOT / "benchmarks/plans").glob("recipe_*.yaml")))
def test_every_run_of_the_plans_can_be_trained(plan, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from recipe import recipe, settings_of

    content = read_yaml(plan)
    for changes in content["runs"].values():
        settings = settings_of(content["common"] | recipe(changes) | changes)
        load_config(None, [override(key, value) for key, value in settings.items()])
