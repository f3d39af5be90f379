"""What an exported model's card says, and does not say, of the machine that trained it, and what is
refused of the reports beside the checkpoint.
"""

import json
from pathlib import Path

import pytest
import yaml
from checkpoints import list_files
from huggingface_hub import ModelCard
from markdown import rows

from mixer.checkpoints.format import TRAINER
from mixer.common.errors import UserError
from mixer.evaluation.evaluate import EvalOptions, evaluate
from mixer.export import export

BOOK = "def read(self, size): return self.text[:size]\n" * 9
NO_PATHS = {"source": "builtin", "path": "", "validation_path": "", "tokenizer": "train"}
HUB = {"source": "hub", "path": "ann/rows"}
# Settings of a run's data, and what the card has under these keys: None where it has none.
DATA = [
    (
        {"source": "text", "path": "/home/ann's/*", "validation_path": "own/a.txt"},
        {"path": None, "directory": None, "validation_path": None},
    ),
    (HUB, {"source": "hub"}),
    (HUB | {"path": "own/rows"}, {"path": None}),
    (HUB | {"path": "/home/ann's/rows"}, {"path": None}),  # of another machine
    ({"tokenizer": "/home/ann's/bpe"}, {"tokenizer": None}),
]


def card(checkpoint: Path, output: Path) -> str:
    export(checkpoint, output, "apache-2.0")
    return (output / "README.md").read_text()


def set_data(checkpoint: Path, data: dict) -> None:
    """As if the checkpoint were of a run with these settings of its data."""
    file = checkpoint / TRAINER
    trainer = json.loads(file.read_text())
    trainer["settings"]["data"] = trainer["settings"]["data"] | NO_PATHS | data
    file.write_text(json.dumps(trainer))
    list_files(checkpoint)


def evaluate_texts(checkpoint: Path, home: Path) -> list[str]:
    """Evaluates texts by all kinds of paths, below `home` and relative to it; returns the names
    that the card may show.
    """
    (home / "own/rows").mkdir(parents=True)
    (home / "own/a book").write_text(BOOK)
    (home / "own/rows/test.jsonl").write_text(json.dumps({"text": BOOK}) + "\n")
    evaluated = {
        "a book, a book": {"text": ["own/a book", f"{home}/own/a book"]},
        "a book, a book, 43 others": {"text": ["own/a book"] * 45},
        "a book (first 9 tokens)": {"text": [f"{home}/own/a book"], "max_tokens": 9},
        "rows test": {"hub": f"{home}/own/rows"},
        "validation split of small": {},
    }
    for options in evaluated.values():
        evaluate([EvalOptions(checkpoint=str(checkpoint), device="cpu", **options)])
    return list(evaluated)


def test_no_path_of_the_training_machine_is_in_the_card(finished, tmp_path, monkeypatch):
    last, home = finished / "step-12", tmp_path / "ann's home"
    home.mkdir()
    monkeypatch.chdir(home)
    names = evaluate_texts(last, home)
    for number, (data, shown) in enumerate(DATA):
        set_data(last, data)
        text = card(last, tmp_path / f"exported-{number}")
        assert not [place for place in ("ann's", "own/", str(tmp_path.parent)) if place in text]
        in_table = [row[0] for row in rows(text) if row]
        assert all(name in in_table and f"- text: {name}; " in text for name in names)
        printed = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["data"]
        assert {key: printed.get(key) for key in shown} == shown
        assert ModelCard(text).data.datasets == (["ann/rows"] if data is HUB else None)


def test_an_older_report_is_named_with_what_it_lacks_and_another_evaluation_replaces_it(
    finished, tmp_path
):
    last, book = finished / "step-12", tmp_path / "book.txt"
    book.write_text(BOOK)
    options = EvalOptions(checkpoint=str(last), text=[str(book)], device="cpu")
    evaluate([options])
    (report,) = finished.glob("eval-step-12-book.txt-*/report.json")
    (result,) = json.loads(report.read_text())
    del result["repeats_share"]
    report.write_text(json.dumps([result]))
    with pytest.raises(UserError, match="KeyError: 'repeats_share'.: evaluate again"):
        card(last, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    evaluate([options])
    assert ["book.txt"] in [row[:1] for row in rows(card(last, tmp_path / "given"))]
