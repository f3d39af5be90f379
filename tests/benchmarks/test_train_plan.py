"""A plan of runs: each trains by the trainer itself, goes on where it was cut, and is compared."""

import json
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

from mixer.common.yaml_file import read_yaml
from mixer.training.config import load_config, override

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "train_plan.py"
PLANS = ROOT / "benchmarks" / "plans"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


@pytest.fixture
def train(small_run, tmp_path):
    """Writes a plan and returns the command that trains it, which writes tmp_path/results."""
    sections = ("model", "data", "train", "optim", "logging")
    common = {f"{part}.{key}": value for part in sections for key, value in small_run[part].items()}
    common |= {"train.non_finite": "skip"}  # as fp16 does: it skips steps to the end

    def command(plan: dict) -> list:
        plan = {"common": common | plan.pop("common", {})} | plan
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
        output = tmp_path / "results"
        return [SCRIPT, tmp_path / "plan.yaml", "--output", output, "--commit", "abc"]

    return command


def runs_in(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())["runs"]


def test_a_plan_of_runs_trains_each_once_and_compares_them(train, tmp_path):
    recipe = {"recipe": str(ROOT / "configs/recipe.yaml"), "optim.warmup_steps": 3}
    runs = {"paper": {}, "recipe": recipe, "diverged": {"optim.lr": 1e18}}
    command, printed = train({"reference": "paper", "runs": runs}), tmp_path / "printed"

    done = run_python(*command, "--only", "paper", output=printed)
    assert done.returncode == 0 and list(runs_in(tmp_path)) == ["paper"], done.stdout
    first = runs_in(tmp_path)["paper"]
    done = run_python(*command, output=printed)
    assert done.returncode == 0, done.stdout
    rows = runs_in(tmp_path)
    assert rows["paper"] == first and list(rows) == list(runs)
    settings = rows["recipe"]["settings"]
    assert settings["optim.name"] == "muon" and settings["model.mixing_init"] == "zero"
    assert rows["recipe"]["loss"][0] != first["loss"][0], "the initial models differ"
    assert "not finite" in rows["diverged"]["failure"]
    text = (tmp_path / "results.md").read_text()
    assert "failed: after the last step" in text and "| paper |" in text
    assert (tmp_path / "results.png").stat().st_size > 0

    for mistake, said in (
        (["--only", "papre"], "--only papre: not in the plan; allowed: diverged paper recipe"),
        (["train.steps"], "write overrides as section.key=value"),
        (["train.stpes=3"], "train.stpes"),
        (["train.eval_samples=3"], "'paper' with other options: train.eval_samples"),
    ):
        done = run_python(*command, *mistake, output=tmp_path / "refused")
        assert done.returncode == 2 and said in done.stdout and "Traceback" not in done.stdout
        assert runs_in(tmp_path) == rows


def test_runs_on_another_text_under_the_same_name_are_refused(train, tmp_path):
    data = {"data.source": "text", "data.path": str(tmp_path / "text"), "data.vocab_size": 300}
    data |= {"data.validation_fraction": 0.5}
    runs = {"first": {}, "second": {"seed": 1}}
    command = train({"common": data, "runs": runs})
    (tmp_path / "text").mkdir()
    for name, status in (("first", 0), ("second", 2)):
        for number in range(8):
            (tmp_path / "text" / f"{number}.txt").write_text(f"{name} {number} " * 400)
        given = ["--only", name, f"data.directory={tmp_path / name}"]
        if name == "second":  # the same directory, prepared anew
            (tmp_path / "first").rename(tmp_path / "earlier")
            given[-1] = f"data.directory={tmp_path / 'first'}"
        done = run_python(*command, *given, output=tmp_path / f"printed-{name}")
        assert done.returncode == status, done.stdout
    assert "the text has changed" in done.stdout and list(runs_in(tmp_path)) == ["first"]


def test_an_interrupted_plan_goes_on_where_it_was_and_a_long_run_resumes(train, tmp_path):
    llama = {"model.architecture": "llama", "model.num_attention_heads": 2}
    plan = {
        "seconds": 0.4,
        "seconds_of_best": [1.5],
        "sweep_share": 0.5,
        "rates": [1e18, 3e-3, 6e-3],
    }
    plan |= {"kinds": {"flat mixer": {16: {"model.hidden_size": 16}}, "Llama": {16: llama}}}
    command, printed = train(plan), tmp_path / "printed"
    folder = tmp_path / "results-runs"
    first = start_python(*command, output=printed)
    while not any("loss" in line for line in lines_of(folder.glob("*-16-1.5-s-*/metrics.jsonl"))):
        assert first.is_alive(), printed.read_text()
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGTERM)
    first.join(60)
    assert first.exitcode == 3, printed.read_text()
    before = runs_in(tmp_path)
    assert max(Counter(row["kind"] for row in before.values()).values()) in (5, 6)
    assert not any(row["budget"] == 1.5 for row in before.values())

    done = run_python(*command, output=tmp_path / "printed-2")
    assert done.returncode == 0, done.stdout
    runs = runs_in(tmp_path)
    assert {name: runs[name] for name in before} == before, "a finished run was repeated"
    logs = [log.read_text() for log in folder.glob("*-16-1.5-s-*.txt")]
    assert any("a fresh start" in log and "; resuming " in log for log in logs)
    assert not list(folder.glob("*/")), "a finished run's directory is left behind"
    for kind in ("flat mixer", "Llama"):
        swept, final, long = (
            [row for row in runs.values() if (row["kind"], row["budget"]) == (kind, budget)]
            for budget in (0.2, 0.4, 1.5)
        )
        for rows, shorter, seconds in ((final, swept, 0.4), (long, final, 1.5)):
            good = [row for row in shorter if "failure" not in row]
            best = min(good, key=lambda row: row["validation_loss"])
            # the best rate of shorter runs, and the next lower one
            assert [row["lr"] for row in rows] == [lr for lr in (6e-3, 3e-3) if lr <= best["lr"]]
            by = max(good, key=lambda row: row["tokens_per_second"]) if rows is final else best
            tokens = min(seconds * by["tokens_per_second"], 4 * by["training_tokens"])
            for row in rows:
                assert row["tokens"] == pytest.approx(tokens, abs=256)
                sizes = [row["loss_by_position"][0][0]]
                sizes += [b - a for (a, _), (b, _) in pairs(row["loss_by_position"])]
                means = [mean for _, mean in row["loss_by_position"]]
                mean = sum(size * mean for size, mean in zip(sizes, means, strict=True)) / 32
                assert mean == pytest.approx(row["validation_loss"], abs=1e-3)
        assert "not finite" in runs[f"{kind} 16, 0.2 s, lr 1e+18"]["failure"]
    text = (tmp_path / "results.md").read_text()
    assert ["flat mixer 16", "0.4"] in [row[:2] for row in rows_of(text)]
    assert "diverged" in text and (tmp_path / "results.png").stat().st_size > 0

    done = run_python(*command, "--only", "Llama 16", "train.batch_size=2", output=printed)
    assert done.returncode == 2 and "with other options: train.batch_size" in done.stdout
    assert runs_in(tmp_path) == runs


def test_what_trains_ends_with_the_command(train, tmp_path):
    command = train({"runs": {"long": {"train.steps": 100_000, "train.eval_every": 0}}})
    folder, process = tmp_path / "results-runs", start_python(*command, output=tmp_path / "printed")
    while not lines_of(folder.glob("long/metrics.jsonl")):
        assert process.is_alive(), (tmp_path / "printed").read_text()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    saved = folder / "long"
    deadline = time.monotonic() + 30
    while not list(saved.glob("step-*")):
        assert time.monotonic() < deadline, "the run goes on, or was not saved"
        time.sleep(0.05)


@pytest.mark.parametrize("plan", sorted(PLANS.glob("*.yaml")), ids=lambda plan: plan.stem)
def test_every_run_of_the_plans_can_be_trained(plan, scripts):
    from train_plan import check_data, models_of, runs_of

    plan = read_yaml(plan)
    given = {"data.path": "texts"} if plan["common"]["data.source"] == "text" else {}
    found = runs_of(plan, given) if "runs" in plan else models_of(plan, given)
    assert len({one.name for one in found}) == len(found)
    for one in found:
        settings = one.settings if "runs" in plan else one.settings(min(plan["rates"]), 100)
        check_data(load_config(None, [override(*item) for item in settings.items()]).data)


def test_the_configuration_of_keyed_mixing_is_the_one_that_was_the_best(scripts):
    from plan_report import best_size

    runs = json.loads((ROOT / "benchmarks/results/model_sizes_h200.json").read_text())["runs"]
    measured = best_size(runs, "keyed in all blocks", 60)["settings"]
    given = [override(key, value) for key, value in measured.items()]
    measured, shipped = load_config(None, given), load_config("configs/keyed.yaml", [])
    assert shipped.model == measured.model and shipped.optim == measured.optim
    assert shipped.train.batch_size == measured.train.batch_size


def row_of(size: str, budget: float, lr: float, loss: float | None = None) -> dict:
    row = {"kind": "mixer", "size": size, "budget": budget, "lr": lr, "parameters": 1, "steps": 1}
    row |= {"training_tokens": 10**9, "tokens_per_second": 1e3, "tokens_a_step": 100}
    row |= {"training_seconds": budget}
    if loss is None:
        return row | {"failure": "not finite"}
    return row | {"validation_loss": loss} | ({"loss_by_position": []} if budget > 15 else {})


@pytest.mark.parametrize("jumps, rates", [({4}, [4, 2]), ({4, 2}, [4, 2, 1]), (set(), [4, 2])])
def test_a_long_run_has_two_rates_and_lower_ones_if_the_loss_jumped(scripts, jumps, rates):
    from plan_figure import ends_of
    from train_plan import Model, longer_runs

    best = row_of("16", 60, 4, 3.4)
    known, model = {"60": best}, Model("mixer", "16", {"optim.warmup_steps": 3})
    job, row = longer_runs({"rates": [2, 4, 1, 8]}, model, 300, [best], known), None
    try:
        while True:
            run = job.send(row)
            rate = run.about["lr"]
            row = known[run.name] = row_of("16", 300, rate, 4.2 if rate in jumps else 3.1)
    except StopIteration:
        pass
    assert [row["lr"] for row in known.values()] == [4, *rates]  # not 8, above the best of 60 s
    assert ends_of(known, "mixer") == [(60, 3.4), (300, 3.1)]


def test_a_run_of_nearly_the_same_steps_is_not_repeated(scripts, tmp_path):
    from train_plan import Run, Study

    row = {"settings": {"train.steps": 1000}}
    study = Study({"runs": {"one": row}}, tmp_path / "a.json", tmp_path, "")
    assert all(study.known(Run("one", {"train.steps": n})) == row for n in (971, 1000, 1030))
    assert not any(study.known(Run("one", {"train.steps": n})) for n in (900, 1100))


def test_a_report_names_what_diverged_jumped_or_was_not_run(scripts):
    from plan_report import notes, rate_rows

    runs = [row_of("16", 15, lr, 5 - lr) for lr in (1, 2)]
    runs += [row_of("16", 60, 2), row_of("16", 60, 1, 4.5)]
    runs[0] |= {"settings": {"model.max_position_embeddings": 8}}
    where = {"hardware": {"device": "a GPU", "torch": "2"}, "commit": "abc", "command": "it"}
    plan = {"seconds": 60, "sweep_share": 0.25, "kinds": {"mixer": {16: {}}, "Llama": {1: {}}}}
    result = where | {"plan": plan, "runs": dict(enumerate(runs))}
    (shown,) = rate_rows(result)
    assert shown["lr 1"] == "4.0000" and shown["lr 2"] == "**3.0000**"
    text = notes(result)
    assert "Diverged: mixer 16 (60 s, lr 2)." in text
    assert "jumped" in text and "mixer 16 (60 s, lr 1)." in text
    assert "In the plan and not run: Llama 1." in text


def pairs(values: list):
    return zip(values, values[1:], strict=False)


def lines_of(files) -> list[dict]:
    found = []
    for file in files:
        try:
            found += read_lines(file.parent)
        except (OSError, ValueError):  # not there any more, or half a line
            pass
    return found
