"""How fast the verdict's models generate."""

import json

import families
import pytest
from markdown import rows
from runs import ROOT

from mixer.common.files import read_json

TRANSFORMER = {"model.architecture": "shifted_qwen3", "model.num_attention_heads": 2}
LOSSES = {"mixer": [3.0, 3.2], "transformer": [3.5]}


@pytest.fixture
def command(monkeypatch, tmp_path):
    """That for two small models, of which results have a run, another seed and a kind."""
    small = {"model.hidden_size": 16, "model.num_hidden_layers": 1, "data.vocab_size": 64}
    context = {"model.max_position_embeddings": 32}

    def row(loss, **more):
        settings = small | context | more.pop("settings", {})
        return {"settings": settings, "parameters": 1000, "validation_loss": loss} | more

    kind = {"kind": "transformer", "settings": TRANSFORMER}
    runs = {
        "a": row(3.0),
        "a, seed 1": row(3.2, seed=1),
        "b, 5 s": row(3.1, budget=5, **kind),  # of the sweep
        "b, 20 s, lr 1": row(3.9, budget=20, **kind),
        "b, 20 s, lr 2": row(3.5, budget=20, **kind),
    }
    models = {"mixer": ("file", "a"), "transformer": ("file", "transformer")}
    monkeypatch.setattr(families, "MODELS", models)
    monkeypatch.setattr(families, "read_results", lambda: {"file": {"runs": runs}})
    options = "--device cpu --prompt 8 --new 24 --batches 1,2 --repeats 2".split()
    arguments = ["families.py", "--output", str(tmp_path / "speed"), *options]
    monkeypatch.setattr("sys.argv", arguments)


def test_speeds_of_the_verdicts_models_stand_beside_their_losses(command, tmp_path):
    families.main()
    measured = json.loads((tmp_path / "speed.json").read_text())
    assert len(measured["generate"]) == 2 * 2 * 2
    found = {row[0]: row[1:] for row in rows((tmp_path / "speed.md").read_text())}
    assert found.keys() == {"model", *LOSSES}
    for name, losses in LOSSES.items():
        loss, seeds, _, *cells = found[name]
        assert loss == f"{sum(losses) / len(losses):.4f}" and seeds == str(len(losses))
        for batch in (1, 2):
            speeds = [
                row["tokens_per_second"]
                for row in measured["generate"]
                if (row["model"], row["batch"]) == (name, batch)
            ]
            no_memory_on_a_cpu = "0"
            assert cells[2 * batch - 2 : 2 * batch] == [f"{max(speeds):,.0f}", no_memory_on_a_cpu]


def test_a_cache_that_fails_leaves_the_other_one(command, tmp_path, monkeypatch):
    def generate(model, batch, new, cache_options, options):
        if cache_options:
            raise RuntimeError("the compiler fails")
        speed = float("nan") if batch > 1 else 123.0
        return {"tokens_per_second": speed, "long_mb": 45.6}

    monkeypatch.setattr(families, "time_generate", generate)
    families.main()
    found = rows((tmp_path / "speed.md").read_text())
    assert [row[4:] for row in found[1:]] == 2 * [["123", "46", "-", "-"]]


def test_the_transformer_without_a_cache_stands_for_by_the_one_with_a_cache():
    results = read_json(ROOT / "benchmarks/results/minute_512_h200.json", "")
    run = results["runs"]["Qwen3-style transformer"]
    model = families.build(run["settings"])
    assert model.config.model_type == "qwen3"
    assert model.num_parameters() == pytest.approx(run["parameters"], rel=1e-3)
