"""The reports in benchmarks/results are what the scripts make of the measured data beside them."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# How results are named, and what makes their report of them.
REPORTS = {
    "generation": "generation",
    "keyed_mixing": "keyed_mixing",
    "model_sizes": "mixer.comparison.report",
    "recipe": "mixer.comparison.report",
    "several_gpus": "several_gpus",
    "token_mixing": "token_mixing_report",
    "training_step": "training_step",
}
RESULTS = [
    pytest.param(data, module, id=data.stem)
    for name, module in REPORTS.items()
    for data in sorted((BENCHMARKS / "results").glob(f"{name}_*.json"))
]


@pytest.mark.parametrize("data, module", RESULTS)
def test_no_number_of_a_report_was_written_by_hand(data, module, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    made = importlib.import_module(module).table(json.loads(data.read_text()))
    written = data.with_suffix(".md").read_text()
    pictures = [line for line in written.splitlines() if line.startswith("![")]
    assert written.split() == " ".join([made, *pictures]).split()
