"""The reports in benchmarks/results are what the scripts make of the measured data beside them."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# How results are named, and what makes their report of them, but for those of plans.
REPORTS = {
    "families_generation": "families",
    "functions_bm25": "bm25",
    "generation": "generation",
    "keyed_mixing": "keyed_mixing",
    "scifact_bm25": "bm25",
    "several_gpus": "several_gpus",
    "token_mixing": "token_mixing_report",
    "training_step": "training_step",
}


def module_of(data: Path) -> str | None:
    if "plan" in json.loads(data.read_text()):
        return "mixer.comparison.report"
    return next((REPORTS[name] for name in REPORTS if f"{data.stem}_".startswith(f"{name}_")), None)


RESULTS = [data for data in sorted((BENCHMARKS / "results").glob("*.json")) if module_of(data)]


@pytest.mark.parametrize("data", RESULTS, ids=lambda data: data.stem)
def test_no_number_of_a_report_was_written_by_hand(data, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = importlib.import_module(module_of(data)).table(json.loads(data.read_text()))
    written = data.with_suffix(".md").read_text()
    pictures = [line for line in written.splitlines() if line.startswith("![")]
    assert written.split() == " ".join([table, *pictures]).split()
