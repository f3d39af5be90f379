"""What is found of a collection, beside BM25."""

import json

import pytest
import retrieval
import verdict

from mixer.common.errors import UserError


def of(name: str) -> list:
    """The published results of a plan, its evaluation, and BM25's."""
    files = f"{name}_512_h200", f"{name}_retrieval_h200", f"{name}_bm25"
    return [json.loads((verdict.RESULTS / f"{file}.json").read_text()) for file in files]


@pytest.mark.parametrize("name", ["scifact", "functions"])
def test_the_tables_are_what_the_script_makes_of_the_results_beside_them(name):
    written = (verdict.RESULTS / f"{name}_found_h200.md").read_text()
    assert written.startswith(retrieval.table(*of(name)) + "\n")


def test_a_kind_has_the_seeds_of_its_best_rate_alone():
    results, evaluation, bm25 = of("scifact")
    for row in results["runs"].values():  # at the other rate, it finds all
        if row.get("lr") == 3e-4 and row["kind"] == "keyed mixer":
            row["validation_loss"] += 1
    for row in evaluation:
        row["ndcg_at_10"] = 1.0 if "lr-0.0003" in row["checkpoint"] else row["ndcg_at_10"]
    text = retrieval.table(results, evaluation, bm25)
    assert "| keyed mixer | 0.5096 |" in text
    assert text.index("| BM25 |") < text.index("| Qwen3-style transformer | 1.0000 |")


def test_files_that_do_not_belong_together_are_refused():
    results, evaluation, bm25 = of("scifact")
    *_, other = of("functions")
    with pytest.raises(UserError, match="BM25 is of functions test, the evaluation of scifact"):
        retrieval.table(results, evaluation, other)
    with pytest.raises(UserError, match="no checkpoint of 'plain mixer, mixing in"):
        retrieval.table(results, [], bm25)
