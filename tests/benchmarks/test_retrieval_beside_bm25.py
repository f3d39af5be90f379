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
    """Which is the one with the lowest loss, whatever is found."""
    results, evaluation, bm25 = of("scifact")
    assert "| keyed mixer | 0.5096 |" in retrieval.table(results, evaluation, bm25)
    results["runs"]["keyed mixer 512, 10 s, lr 0.0003"]["validation_loss"] = 1.0
    assert "| keyed mixer | 0.4482 |" in retrieval.table(results, evaluation, bm25)


def test_files_that_do_not_belong_together_are_refused():
    results, evaluation, bm25 = of("scifact")
    *_, other = of("functions")
    with pytest.raises(UserError, match="BM25 has collection functions test, .*512.* scifact test"):
        retrieval.table(results, evaluation, other)
    with pytest.raises(UserError, match="BM25 has documents 1, .* 5183: both must be of one"):
        retrieval.table(results, evaluation, bm25 | {"documents": 1})
    with pytest.raises(UserError, match="has 0 checkpoints of 'plain mixer, mixing in"):
        retrieval.table(results, [], bm25)
    with pytest.raises(UserError, match="has 2 checkpoints of 'plain mixer, mixing in"):
        retrieval.table(results, 2 * evaluation, bm25)
