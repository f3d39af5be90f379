"""Models that a plan has kept, and how fast they generate."""

import json

import families
import pytest
import yaml
from launching import run_python
from markdown import rows
from runs import ROOT

from mixer.common.errors import UserError


@pytest.fixture(scope="module")
def results(small_run, tmp_path_factory):
    """Those of a plan of three kinds, one of which diverges, at two rates and with two seeds."""
    sections = ("model", "data", "optim")
    common = {f"{part}.{key}": value for part in sections for key, value in small_run[part].items()}
    transformer = {"model.architecture": "shifted_qwen3", "model.num_attention_heads": 2}
    plan = {
        "common": common | {"train.eval_samples": 8, "logging.log_every": 1},
        "seconds": 0.2,
        "sweep_share": 0.5,
        "rates": [1e-3, 2e-3],
        "keep_checkpoints": True,
        "seeds": [1],
        "kinds": {
            "mixer": {16: {}},
            "Qwen3": {16: transformer},
            "diverged": {16: {"optim.matrices_lr": 1e18}},
        },
    }
    folder = tmp_path_factory.mktemp("families")
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    command = [ROOT / "benchmarks/train_plan.py", folder / "plan.yaml", "--output", folder / "plan"]
    printed = run_python(*command, "--commit", "abc", output=folder / "printed", status=2)
    assert printed.count("diverges even at") == 1
    return folder / "plan.json"


def test_models_that_a_plan_has_kept_are_measured_once_and_stand_beside_their_losses(
    results, tmp_path, monkeypatch, capsys
):
    small = "--device cpu --prompt 8 --new 24 --batches 1,2 --repeats 2".split()
    command = ["families.py", str(results), "--output", str(tmp_path / "speed"), *small]
    monkeypatch.setattr("sys.argv", command)
    families.main()
    runs = json.loads(results.read_text())["runs"]
    measured = json.loads((tmp_path / "speed.json").read_text())
    assert len(measured["generate"]) == 2 * 2 * 2
    found = {row[0]: row for row in rows((tmp_path / "speed.md").read_text())}
    assert found.keys() == {"model", "mixer", "Qwen3"}
    for name in ("mixer", "Qwen3"):
        of_kind = [row for row in runs.values() if row["kind"] == name and row["budget"] == 0.2]
        best = min(
            (row for row in of_kind if "seed" not in row), key=lambda row: row["validation_loss"]
        )
        losses = [row["validation_loss"] for row in of_kind if row["lr"] == best["lr"]]
        _, loss, seeds, rate, _, _, _, *cells = found[name]
        assert loss == f"{sum(losses) / 2:.4f}" and seeds == "2" and float(rate) == best["lr"]
        for batch in (1, 2):
            speeds = {
                row["cache"]: row["tokens_per_second"]
                for row in measured["generate"]
                if (row["model"], row["batch"]) == (name, batch)
            }
            cache = max(speeds, key=speeds.get)
            assert [f"{speeds[cache]:,.0f}", cache] == cells[2 * batch - 2 : 2 * batch]

    def measured_again(*_):
        pytest.fail("a model is measured again")

    capsys.readouterr()
    monkeypatch.setattr(families, "time_generate", measured_again)
    families.main()
    assert (tmp_path / "speed.md").read_text().strip() == capsys.readouterr().out.strip()
    monkeypatch.setattr("sys.argv", [*command, "--new", "23"])
    with pytest.raises(UserError, match="speed.json has other settings: give those, or another"):
        families.main()


def test_a_cache_that_fails_leaves_the_other_one(results, tmp_path, monkeypatch):
    def generate(model, batch, new, cache_options, options):
        if cache_options:
            raise RuntimeError("the compiler fails")
        return {"tokens_per_second": float("nan") if batch > 1 else 123.0}

    monkeypatch.setattr(families, "time_generate", generate)
    command = ["families.py", str(results), "--output", str(tmp_path / "speed"), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", command)
    families.main()
    found = rows((tmp_path / "speed.md").read_text())
    assert [row[7:] for row in found[1:]] == 2 * [["123", "cached", "-", "-"]]


def test_a_plan_that_kept_nothing_is_refused(tmp_path, monkeypatch):
    row = {"kind": "a", "budget": 1, "validation_loss": 3.0}
    (tmp_path / "plan.json").write_text(
        json.dumps({"runs": {"a": row, "a, seed 1": row | {"seed": 1}}})
    )
    monkeypatch.setattr("sys.argv", ["families.py", str(tmp_path / "plan.json"), "--output", "x"])
    with pytest.raises(UserError, match="has no checkpoint of a run .* loss: give the plan keep_"):
        families.main()


def test_kinds_without_a_loss_are_left_out_in_a_line(results, tmp_path, capsys):
    runs = json.loads(results.read_text())["runs"]
    for row in runs.values():
        if row["kind"] == "Qwen3" or "seed" in row:
            row.pop("validation_loss", None)
            row["failure"] = "the loss is not finite"
    (tmp_path / "plan.json").write_text(json.dumps({"runs": runs}))
    best = families.best_of_kinds(tmp_path / "plan.json")
    assert {kind: row["seeds"] for kind, row in best.items()} == {"mixer": 1}
    said = capsys.readouterr().err
    for kind in ("Qwen3", "diverged"):
        assert f"{kind} is left out: no run of it has a loss and a checkpoint\n" in said
