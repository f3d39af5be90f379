"""The law of the loss by compute: of runs made up with a known answer, and of the plan at toy size,
which is cut and goes on.
"""

import json
import math
import os
import random
import signal
import time

import pytest
import scaling
import yaml
from launching import run_python, start_python
from markdown import rows
from pictures import assert_png
from runs import ROOT

from mixer.common.errors import UserError
from mixer.common.values import read_yaml

BUDGETS = (20, 60, 200)
SIZES = (0.6, 1.2, 2.4)  # of the best one after a time
FLOOR = 1.8
KINDS = ("transformer", "mixer")
# What a toy of the plan divides its sizes by, and has in their place.
SMALLER = {"model.hidden_size": 16, "model.intermediate_size": 16, "model.mixer_key_size": 16}
SMALLER |= {"model.num_hidden_layers": 2}
TOY = {"model.num_attention_heads": 2, "model.num_mixer_heads": 2, "model.mixer_keyed_blocks": [2]}


def made_up(ratio: float, growth: float = 1.0, sizes=SIZES, seeds: int = 2) -> dict:
    """Results in which the transformer needs `ratio` times the compute of the mixer after 60 s,
    and `growth` times that with ten times the compute.
    """
    noise = random.Random(0)
    runs = {}
    for kind in KINDS:
        for budget in BUDGETS:
            flops = 3e14 * budget
            best_size = 2e7 * math.sqrt(budget / 20)
            worth = ratio * growth ** math.log10(budget / 60) if kind == "mixer" else 1.0
            lowest = FLOOR + 4.2 * (flops * worth / 1e15) ** -0.15
            for size in sizes:
                loss = lowest * math.exp(0.01 * math.log(size) ** 2)
                for seed in range(seeds):
                    row = {"kind": kind, "size": str(size), "budget": budget, "lr": 1e-3}
                    row |= {"parameters": size * best_size, "training_seconds": budget}
                    row |= {"useful_tflops": 300.0}
                    row["validation_loss"] = loss * math.exp(noise.gauss(0, 1e-3))
                    runs[f"{kind} {size}, {budget} s, seed {seed}"] = row
    kinds = {kind: {str(size): {"seconds": [*BUDGETS]} for size in sizes} for kind in KINDS}
    return {"plan": {"kinds": kinds, "seconds": 20}, "runs": runs}


@pytest.mark.parametrize(
    ("growth", "said"), [(1.0, "may stay the same"), (1.3, "grows"), (0.8, "shrinks")]
)
def test_the_factor_that_runs_were_made_with_is_inside_of_its_interval(growth, said):
    kinds = scaling.cells_of(made_up(1.3, growth))
    estimates = scaling.estimates_of(kinds)
    for measure in scaling.COMPUTE:
        for budget in BUDGETS:
            ratio = estimates["ratio", measure, "mixer", budget].exp()
            assert ratio.low < 1.3 * growth ** math.log10(budget / 60) < ratio.high
            assert ratio.high - ratio.low < 0.13
            assert estimates["lead", measure, "mixer", budget].low > 0
        assert scaling.direction(estimates["trend", measure, "mixer", 0]) == said
    floor = estimates["floor", "FLOPs", "", 0]
    assert floor.low < FLOOR < floor.high
    for cells in kinds.values():
        for best in scaling.optima(cells):
            best_size = 2e7 * math.sqrt(best.budget / 20)
            assert best.parameters == pytest.approx(SIZES[1] * best_size)
            assert scaling.place(best, cells) == "the best of 3 sizes"


def test_the_published_law_is_what_the_script_makes_of_the_runs():
    results = ROOT / "benchmarks/results"
    kinds = scaling.cells_of(scaling.read_runs(results / "scaling_h200.json"))
    assert (results / "scaling_law_h200.md").read_text().startswith(scaling.table(kinds))


@pytest.mark.parametrize(("sizes", "end"), [((1.5, 3, 6), "smallest"), ((0.2, 0.4), "largest")])
def test_a_best_size_at_the_end_of_those_that_were_trained_is_called_so(sizes, end):
    kinds = scaling.cells_of(made_up(1.3, sizes=sizes))
    text = scaling.table(kinds)
    assert text.count(f"| the best of {len(sizes)} sizes, the {end} |") == 6
    losses = [math.exp(point.log_loss) for point in scaling.optima(kinds["mixer"])]
    expected = [min(c.log_loss for c in kinds["mixer"] if c.budget == b) for b in BUDGETS]
    assert losses == [*map(math.exp, expected)]


def test_of_several_rates_or_other_options_the_best_count_and_nothing_of_sweeps():
    result = made_up(1.3)
    expected = scaling.cells_of(result)
    for name, row in [*result["runs"].items()]:
        worse = row | {"lr": 1e-2, "validation_loss": row["validation_loss"] + 1}
        result["runs"][f"{name}, worse"] = worse
        result["runs"][f"{name}, worse decay"] = worse | {"size": f"{row['size']}, weight decay 1"}
        result["runs"][f"{name}, swept"] = row | {"budget": row["budget"] / 4, "validation_loss": 1}
        result["runs"][f"{name}, speed"] = row | {"budget": 0, "validation_loss": 1.0}
        result["runs"][f"{name}, failed"] = row | {"lr": 1, "failure": "loss not finite"}
    result["plan"] |= {"rates": [1e-3, 1e-2], "sweep_share": 0.25}
    assert scaling.cells_of(result) == expected


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (made_up(1.3, seeds=1), "no run has a second seed"),
        ({"plan": {"runs": {}}, "runs": {}}, "the results are not of two or more kinds"),
        (made_up(1.3) | {"runs": {}}, "transformer has runs of fewer than two times"),
    ],
)
def test_results_without_a_law_are_refused(result, said):
    with pytest.raises(UserError, match=said):
        scaling.cells_of(result)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"validation_loss": math.nan}, "validation_loss = nan; allowed: a number above 0"),
        ({"training_seconds": 0}, "training_seconds = 0; allowed: a number above 0"),
        ({"parameters": "many"}, "parameters = 'many'; allowed"),
        ({"budget": "long"}, "budget = 'long'; allowed: a finite number"),
    ],
)
def test_damaged_results_are_refused_in_a_line(tmp_path, change, said):
    result = made_up(1.3)
    row = next(iter(result["runs"].values()))
    row |= change
    file = tmp_path / "results.json"
    file.write_text(json.dumps(result))
    with pytest.raises(UserError, match=said):
        scaling.read_runs(file)


def test_a_model_whose_operations_cannot_be_counted_is_named_and_not_called_damaged(tmp_path):
    result = made_up(1.3)
    row = next(row for row in result["runs"].values() if row["kind"] == "mixer")
    del row["useful_tflops"]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(result))
    with pytest.raises(UserError, match="runs.mixer .* cannot be counted: .* the kind 'mixer'$"):
        scaling.read_runs(file)


@pytest.mark.slow
def test_the_plan_at_toy_size_is_cut_and_goes_on_and_has_a_report(small_run, tmp_path, monkeypatch):
    plan = read_yaml(ROOT / "benchmarks/plans/scaling.yaml")
    sections = ("model", "data", "train", "logging")
    toy = {f"{part}.{key}": value for part in sections for key, value in small_run[part].items()}
    toy |= {"train.mixed_precision": "no", "data.source": "builtin", "logging.log_every": 2}
    plan["common"] |= toy
    plan["recipe"] = str(ROOT / plan["recipe"])
    plan["seconds"] /= 150
    for options in (size for sizes in plan["kinds"].values() for size in sizes.values()):
        for key, divisor in SMALLER.items():
            if key in options:
                options[key] //= divisor
        options |= {key: value for key, value in TOY.items() if key in options}
        options["seconds"] = [seconds / 150 for seconds in options.get("seconds", [15])]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    output = tmp_path / "toy"
    script = ROOT / "benchmarks/train_plan.py"
    command = [script, tmp_path / "plan.yaml", "--output", output, "--commit", "abc"]
    first = start_python(*command, output=tmp_path / "printed")
    while not list((tmp_path / "toy-runs").glob("*-0.1-s-lr-*/metrics.jsonl")):  # before a step
        assert first.is_alive(), (tmp_path / "printed").read_text()
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGTERM)
    first.join(60)
    assert first.exitcode == 3, (tmp_path / "printed").read_text()
    before = json.loads((tmp_path / "toy.json").read_text())["runs"]

    run_python(*command, output=tmp_path / "printed-2", patience=600)
    runs = json.loads((tmp_path / "toy.json").read_text())["runs"]
    assert {name: runs[name] for name in before} == before and len(before) < len(runs) == 50
    monkeypatch.setattr("sys.argv", ["scaling.py", f"{output}.json", "--output", f"{output}_law"])
    scaling.main()
    text = (tmp_path / "toy_law.md").read_text()
    assert "How many times as much Qwen3-style transformer needs as attention in some" in text
    budgets = [row[1] for row in rows(text) if len(row) == 7]
    assert budgets == ["budget, s", *2 * ["0.1", "0.3", "1"]]
    assert_png(tmp_path / "toy_law.png")
