"""The figure of reach against loss."""

import json

import pytest
import reach
from markdown import rows
from pictures import assert_png

from mixer.common.errors import UserError


def results(path, source, context, losses):
    """A file of results, from the losses of runs by their names."""
    settings = {"data.source": source, "model.max_position_embeddings": context}
    runs = {name: {"settings": settings, "validation_loss": loss} for name, loss in losses.items()}
    path.write_text(json.dumps({"runs": runs}))
    return path


def test_losses_are_compared_with_those_of_all_lags_on_the_same_text(tmp_path, monkeypatch):
    books = {"plain, all lags": 4.0, "plain, all lags, seed 1": 3.0, "plain, window 4": 7.0}
    code = {"plain, all lags": 1.0, "plain, window 4": 0.5, "gated, all lags": 2.0}
    files = [
        results(tmp_path / "books.json", "jsonl", 512, books),
        results(tmp_path / "code.json", "builtin", 2048, code),
    ]
    output = tmp_path / "curves"
    monkeypatch.setattr("sys.argv", ["reach.py", *map(str, files), "--output", str(output)])
    reach.main()
    assert rows((tmp_path / "curves.md").read_text())[1:] == [
        ["books, 512", "plain", "4", "7.0000", "2.0000", "7.0000"],
        ["books, 512", "plain", "512", "3.5000", "1.0000", "4.0000, 3.0000"],
        ["code, 2048", "plain", "4", "0.5000", "0.5000", "0.5000"],
        ["code, 2048", "plain", "2048", "1.0000", "1.0000", "1.0000"],
        ["code, 2048", "gated", "2048", "2.0000", "1.0000", "2.0000"],
    ]
    assert_png(tmp_path / "curves.png")


def test_a_form_whose_run_with_all_lags_is_missing_is_refused(tmp_path):
    file = results(tmp_path / "books.json", "jsonl", 512, {"plain, window 4": 7.0})
    with pytest.raises(UserError, match="no run of 'plain' with all lags"):
        reach.curves_of(file)
