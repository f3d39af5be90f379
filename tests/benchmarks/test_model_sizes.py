"""Models of several sizes for equal times: interrupted in a long run, and gone on with."""

import json
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from launching import run_python, start_python
from markdown import rows as rows_of
from runs import read_lines

from mixer.common.locks import locked
from mixer.common.yaml_file import read_yaml
from mixer.training.config import load_config, override

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "model_sizes.py"
PLANS = ROOT / "benchmarks" / "plans"


def write_plan(file: Path, small_run: dict) -> Path:
    common = {
        f"{section}.{key}": value
        for section in ("model", "data", "train", "optim", "logging")
        for key, value in small_run[section].items()
    }
    llama = {"model.architecture": "llama", "model.num_attention_heads": 2}
    plan = {
        "seconds": 0.4,
        "seconds_of_best": [3],
        "sweep_share": 0.5,
        "rates": [1e18, 3e-3, 6e-3],
        "common": common | {"train.non_finite": "skip"},  # as fp16 does: it skips steps to the end
        "kinds": {"flat mixer": {16: {"model.hidden_size": 16}}, "Llama": {16: llama}},
    }
    file.write_text(yaml.safe_dump(plan, sort_keys=False))
    return file


def test_an_interrupted_plan_goes_on_where_it_was_and_a_long_run_resumes(small_run, tmp_path):
    plan, output = write_plan(tmp_path / "plan.yaml", small_run), tmp_path / "sizes"
    command = [SCRIPT, plan, "--output", output, "--commit", "abc123", "--at-once", 2]
    folder = Path(f"{output}-runs")
    folder.mkdir()

    def runs_with(key: str, name: str) -> int:
        assert first.is_alive(), (tmp_path / "printed-1").read_text()
        time.sleep(0.01)
        files = folder.glob(f"{name}/metrics.jsonl")
        return sum(any(key in line for line in lines_of(file)) for file in files)

    with locked(folder / "gpu-.lock"):  # as another process would whose turn it is
        first = start_python(*command, output=tmp_path / "printed-1")
        while runs_with("validation_loss", "*-speed") < 2:  # both have started
            pass
        time.sleep(0.3)
        assert not runs_with("loss", "*-speed"), "a run trains while it is another's turn"
    while not runs_with("loss", "*-16-3-s-*"):
        pass
    os.killpg(first.pid, signal.SIGTERM)  # as a job's end does
    first.join()
    wait_for_group(first.pid)
    before = json.loads(output.with_suffix(".json").read_text())["runs"]
    # All runs of one kind but its long ones; the other kind may be at any of its runs.
    assert max(Counter(row["kind"] for row in before.values()).values()) in (5, 6)
    assert not any(row["budget"] == 3 for row in before.values())

    done = run_python(*command, output=tmp_path / "printed-2")
    assert done.returncode == 0, done.stdout
    runs = json.loads(output.with_suffix(".json").read_text())["runs"]
    assert {name: runs[name] for name in before} == before, "a finished run was repeated"
    logs = [log.read_text() for log in folder.glob("*-16-3-s-*.txt")]
    assert any("a fresh start" in log and "; resuming " in log for log in logs)
    assert not list(folder.glob("*/")), "a finished run's directory is left behind"
    for kind in ("flat mixer", "Llama"):
        swept, final, long = (
            [row for row in runs.values() if (row["kind"], row["budget"]) == (kind, budget)]
            for budget in (0.2, 0.4, 3)
        )
        for rows, shorter, seconds in ((final, swept, 0.4), (long, final, 3)):
            good = [row for row in shorter if "failure" not in row]
            best = min(good, key=lambda row: row["validation_loss"])
            # the best rate of shorter runs, and the next lower one
            assert [row["lr"] for row in rows] == [lr for lr in (6e-3, 3e-3) if lr <= best["lr"]]
            # the fastest of a sweep, as other runs only slow one; for the long ones the best run
            by = max(good, key=lambda row: row["tokens_per_second"]) if rows is final else best
            tokens = min(seconds * by["tokens_per_second"], 4 * by["training_tokens"])
            for row in rows:
                assert row["tokens"] == pytest.approx(tokens, abs=256)
                mean = sum(row["loss_by_position"]) / 32
                assert mean == pytest.approx(row["validation_loss"], abs=1e-3)
        assert "not finite" in runs[f"{kind} 16, 0.2 s, lr 1e+18"]["failure"]
    text = output.with_suffix(".md").read_text()
    assert ["flat mixer 16", "0.4"] in [row[:2] for row in rows_of(text)]
    assert "diverged" in text and "flat mixer: loss = " in text
    assert output.with_suffix(".png").stat().st_size > 0


@pytest.mark.parametrize("plan", sorted(PLANS.glob("model_sizes*.yaml")))
def test_every_model_of_the_plans_can_be_trained(plan, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from model_sizes import models_of

    models = models_of(read_yaml(plan), [])
    assert len({model.name for model in models}) == len(models)
    for model in models:
        load_config(None, [override(key, value) for key, value in model.options.items()])


def test_the_configuration_of_keyed_mixing_is_the_one_that_was_the_best(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from model_sizes_report import best_size

    runs = json.loads((ROOT / "benchmarks/results/model_sizes_h200.json").read_text())["runs"]
    measured = best_size(runs, "keyed in all blocks", 60)["settings"]
    given = [override(key, value) for key, value in measured.items()]
    measured, shipped = load_config(None, given), load_config("configs/keyed.yaml", [])
    assert shipped.model == measured.model and shipped.optim == measured.optim
    assert shipped.train.batch_size == measured.train.batch_size


def test_a_command_can_train_some_models_of_a_plan_and_keeps_the_results_of_others(
    small_run, tmp_path
):
    plan, output = write_plan(tmp_path / "plan.yaml", small_run), tmp_path / "sizes"
    plan.write_text(yaml.safe_dump(read_yaml(plan) | {"rates": [3e-3], "seconds_of_best": [0.6]}))
    command, printed = [SCRIPT, plan, "--output", output, "--only"], tmp_path / "printed"
    for only, kinds in (("Llama 16", {"Llama"}), ("flat mixer", {"Llama", "flat mixer"})):
        done = run_python(*command, only, "train.eval_samples=3", output=printed)
        assert done.returncode == 0, done.stdout
        runs = json.loads(output.with_suffix(".json").read_text())["runs"]
        assert {row["kind"] for row in runs.values()} == kinds
        assert {row["budget"] for row in runs.values()} == {0, 0.2, 0.4, 0.6}
        assert all(row["settings"]["train.eval_samples"] == 3 for row in runs.values())
    done = run_python(*command, "LLama", output=printed)
    assert done.returncode == 2
    assert "--only LLama: not in the plan; allowed: Llama 'Llama 16' 'flat mixer' " in done.stdout


def test_no_command_loses_results(small_run, tmp_path):
    plan, output = write_plan(tmp_path / "plan.yaml", small_run), tmp_path / "sizes"
    file, printed = output.with_suffix(".json"), tmp_path / "printed"
    row = {"kind": "Llama", "size": "16", "budget": 0, "validation_loss": 5.0}
    row |= {"settings": {"train.steps": 9, "optim.lr": 1e-3, "optim.warmup_steps": 3}}
    file.write_text(json.dumps({"runs": {"Llama 16, speed": row}}))
    before, command = file.read_text(), [SCRIPT, plan, "--output", output]
    for wrong in ("train.batchsize=8", "data.directory="):
        done = run_python(*command, wrong, output=printed)
        assert done.returncode == 2 and wrong.strip("=").split("=")[0] in done.stdout
        assert file.read_text() == before
    done = run_python(*command, "--seconds-in-all", 1, "train.batch_size=2", output=printed)
    assert done.returncode == 3 and "1 runs had other options" in done.stdout
    assert json.loads(file.read_text())["dropped"] == {"Llama 16, speed": row}


def test_a_start_that_took_long_does_not_keep_the_next_run_from_its_time(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import model_sizes

    model = model_sizes.Model("mixer", "16", {})
    study = model_sizes.Study({}, (model,), tmp_path, tmp_path, time.time() + 145, 1, "")
    monkeypatch.setitem(model_sizes.beside, model.name, 130)  # compiled, or waited for its turn
    model_sizes.check_time(study, model, 60, "a run")
    monkeypatch.setitem(model_sizes.beside, model.name, 9)
    model_sizes.check_time(study, model, 110, "a run")
    with pytest.raises(model_sizes.NoTime):
        late = model_sizes.Study({}, (model,), tmp_path, tmp_path, time.time() + 85, 1, "")
        model_sizes.check_time(late, model, 60, "a run")


def test_runs_of_other_options_are_no_part_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from model_sizes import has_changed, models_of

    plan = {"common": {"optim.warmup_steps": 8}, "kinds": {"mixer": {16: {}}, "Llama": {16: {}}}}
    models = tuple(models_of(plan, ["train.batch_size=4"]))
    made_by = {"train.steps": 9, "optim.lr": 1e-3, "optim.warmup_steps": 3}
    row = {"kind": "mixer", "size": "16", "settings": {"train.batch_size": 4} | made_by}
    assert not has_changed(row, models)
    assert has_changed(row, tuple(models_of(plan, ["train.batch_size=8"])))
    assert has_changed(row, tuple(models_of(plan, ["train.batch_size=4", "optim.warmup_steps=2"])))
    assert not has_changed(row | {"size": "32"}, tuple(models_of(plan, ["train.batch_size=8"])))


def test_a_run_is_repeated_for_other_steps_than_a_machine_explains(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import model_sizes

    model = model_sizes.Model("mixer", "16", {"optim.warmup_steps": 10})
    study = model_sizes.Study({}, (model,), tmp_path / "a.json", tmp_path, -math.inf, 1, "")
    row = {"settings": {"train.steps": 1000}, "lr": 1e-3, "validation_loss": 3.0}
    study.file.write_text(json.dumps({"runs": {"mixer 16, 60 s, lr 0.001": row}}))
    for steps in (971, 1000, 1030):
        assert model_sizes.train_for(study, model, 60, 1e-3, steps) == row
    for steps in (900, 1100):
        with pytest.raises(model_sizes.NoTime):  # it would begin a run
            model_sizes.train_for(study, model, 60, 1e-3, steps)


def test_the_edge_of_the_rates_is_named_for_best_runs_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from model_sizes_report import edge_note

    row = {"kind": "mixer", "size": "16"}
    runs = [row | {"budget": 15, "lr": lr, "validation_loss": 4.0} for lr in (1, 2, 3)]
    for budget, lr, loss in ((60, 3, 3.1), (60, 2, 3.0), (300, 2, 2.8), (300, 1, 2.7)):
        runs.append(row | {"budget": budget, "lr": lr, "validation_loss": loss, "loss": []})
    assert "tried for mixer 16 (300 s, 1):" in edge_note(dict(enumerate(runs)))


def test_a_measured_loss_stands_before_one_that_is_estimated(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from model_sizes_report import size_rows

    def row(size: str, budget: float, loss: float) -> dict:
        row = {"kind": "mixer", "size": size, "parameters": int(size), "budget": budget}
        return row | {"training_seconds": budget, "validation_loss": loss}

    runs = [row("1", 15, 5.0), row("1", 60, 4.0), row("1", 120, 3.9)]
    runs += [row("2", 15, 6.0), row("2", 60, 4.1)]
    rows = {row["s"]: row["mixer"] for row in size_rows(dict(enumerate(runs)))}
    assert rows["60"] == "1: 4.000" and rows["120"] == "1: 3.900"  # continued, 2 would be at 3.39
    assert "240" not in rows
    assert rows["30"] == "1: about 4.472"  # half way: the root of 5 x 4


def test_a_long_run_that_diverges_is_named_and_leaves_the_sweep_as_it_was(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from model_sizes_report import diverged_note, rate_rows

    row = {"kind": "mixer", "size": "16", "parameters": 1, "tokens_per_second": 1, "steps": 1}
    runs = [row | {"budget": 15, "lr": lr, "validation_loss": 5 - lr} for lr in (1, 2)]
    runs += [row | {"budget": 60, "lr": 2, "failure": "not finite"}]
    result = {"plan": {"seconds": 60, "sweep_share": 0.25}, "runs": dict(enumerate(runs))}
    (shown,) = rate_rows(result)
    assert shown["lr 1"] == "4.0000" and shown["lr 2"] == "**3.0000**"
    assert diverged_note(result).endswith(": mixer 16 (60 s, lr 2).")


def test_a_report_says_which_runs_its_plan_asks_for_are_missing(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from model_sizes_report import missing_note

    def row(size: str, budget: float, lr: float, loss: float) -> dict:
        row = {"kind": "mixer", "size": size, "budget": budget, "lr": lr, "validation_loss": loss}
        return row | ({"loss": []} if budget == 60 else {})

    runs = [row("1", 15, 2, 5.0), row("1", 15, 4, 4.9), row("1", 60, 2, 4.0)]
    runs += [row("2", 60, 2, 4.1), row("3", 15, 2, 5.0), row("1", 300, 4, 3.0)]
    plan = {"seconds": 60, "seconds_of_best": [300], "sweep_share": 0.25, "rates": [2, 4]}
    plan |= {"kinds": {"mixer": {1: {}, 2: {}, 3: {}}, "Llama": {1: {}}}}
    result = {"plan": plan, "runs": dict(enumerate(runs))}
    assert missing_note(result) == (
        "Not as the plan has it: mixer 1 (not for 60 s at 4, the best of its sweep); mixer 2 (no "
        "sweep); mixer 3 (no sweep at 4, not for 60 s). In the plan and not run: Llama 1."
    )
    del plan["kinds"]["Llama"], plan["kinds"]["mixer"][3]
    result["runs"] |= {6: row("1", 60, 4, 4.1), 7: row("2", 15, 2, 5), 8: row("2", 15, 4, 5.1)}
    assert missing_note(result) == ""
    del result["runs"][5]
    assert missing_note(result) == "Not as the plan has it: mixer (not for 300 s)."


def test_a_long_run_has_two_rates_and_one_whose_loss_jumped_is_no_end(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import model_sizes
    from model_sizes_report import ends_of, jumped_note

    measured = {"training_tokens": 10**9, "tokens_per_second": 1e3, "tokens_a_step": 100}
    own = {"kind": "mixer", "size": "16"} | measured
    runs = {"60": own | {"budget": 60, "lr": 4, "validation_loss": 3.4, "training_seconds": 60}}
    model = model_sizes.Model("mixer", "16", {})
    plan = {"seconds": 60, "rates": [2, 4, 1, 8]}
    study = model_sizes.Study(plan, (model,), tmp_path / "a.json", tmp_path, 0, 1, "")
    model_sizes.write_text(study.file, json.dumps({"runs": runs}))

    jump = {4}

    def name(seconds, rate):
        return str(rate) if seconds == 300 else f"{rate}, {seconds} s"

    def train_for(study, model, seconds, rate, steps):
        loss = 4.2 if rate in jump else 3.1
        row = own | {"budget": seconds, "lr": rate, "validation_loss": loss, "loss": []}
        row |= {"training_seconds": seconds}
        model_sizes.write_text(
            study.file,
            json.dumps({"runs": study.runs() | {name(seconds, rate): row}}),
        )
        return row

    monkeypatch.setattr(model_sizes, "train_for", train_for)
    model_sizes.train_best(study, "mixer", 300)
    runs = study.runs()
    assert list(runs) == ["60", "4", "2"]  # and not 8, which is above the best of 60 s
    assert [end.loss for end in ends_of(runs, "mixer")] == [3.4, 3.1]
    assert "mixer 16 (300 s, lr 4). " in jumped_note(runs)
    del runs["2"]
    assert [end.loss for end in ends_of(runs, "mixer")] == [3.4]
    jump.add(2)
    model_sizes.train_best(study, "mixer", 600)
    assert {row["lr"] for row in study.runs().values() if row["budget"] == 600} == {4, 2, 1}
    jump.clear()
    model_sizes.train_best(study, "mixer", 900)
    assert {row["lr"] for row in study.runs().values() if row["budget"] == 900} == {4, 2}


def lines_of(file: Path) -> list[dict]:
    try:
        return read_lines(file.parent)
    except (OSError, ValueError):  # not there any more, or half a line
        return []


def wait_for_group(group: int, patience: float = 30) -> None:
    """Until the workers have ended, too."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("workers outlive the command")


def test_the_first_size_of_every_kind_comes_before_the_second_of_any(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from model_sizes import models_of

    models = models_of(read_yaml(PLANS / "model_sizes.yaml"), [])
    sizes = [model.size for model in models]
    assert sizes == sorted(sizes, key=["512", "1024", "256"].index)
    first = [model.kind for model in models if model.size == "512"]
    assert first == list(read_yaml(PLANS / "model_sizes.yaml")["kinds"])
