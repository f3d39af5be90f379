"""One class is enough for a new objective: the code of docs/add_an_objective.md runs as it stands
there, and nothing in the package knows it.
"""

import re
import sys
from types import ModuleType

import pytest
from checkpoints import evaluate
from runs import ROOT, assert_same, killed_after, read_lines

from mixer.common.errors import UserError
from mixer.objectives.config import OBJECTIVES
from mixer.training.config import load_config
from mixer.training.loop import train

PAGE = (ROOT / "docs/add_an_objective.md").read_text()
CLOZE, FOCAL = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def run_page(write_config, monkeypatch):
    """Runs code of the page as a file of one's own, with a configuration and overrides."""
    path = str(write_config())
    known = dict(OBJECTIVES)

    def run(code: str, *overrides: str) -> None:
        module = ModuleType("mine")
        monkeypatch.setitem(sys.modules, "mine", module)
        monkeypatch.setattr(sys, "argv", ["mine.py", path, *overrides])
        exec(compile(code, "mine.py", "exec"), module.__dict__)

    yield run
    OBJECTIVES.clear()
    OBJECTIVES.update(known)


def test_the_pages_objective_trains_resumes_and_is_evaluated(run_page, tmp_path, capsys):
    run_page(CLOZE, "name=cloze", "optim.lr=1e-2")
    run = tmp_path / "runs/cloze"
    lines = [line for line in read_lines(run) if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2
    hidden = 8 * 32 // 7 * 12
    assert lines[-1]["tokens"] == pytest.approx(hidden, rel=0.05)
    printed = capsys.readouterr().out
    assert re.search(r"validation loss \d\.\d+, \d+\.\d% of the hidden tokens are right", printed)
    (data,) = re.findall(r"^  mixer eval .* --data (\S+)$", printed, re.MULTILINE)

    cut = killed_after(run, 8, "cut")
    run_page(CLOZE, "name=cut", "optim.lr=1e-2")
    assert_same(cut, run, 12)
    with pytest.raises(UserError, match="data.source = 'copy' with train.objective = cloze, "):
        run_page(CLOZE, "name=other", "data.source=copy")

    del OBJECTIVES["cloze"]  # for other programs, it is a language model
    assert evaluate(run / "best", data=data)["loss"] > 0
    with pytest.raises(UserError, match="was trained on train.objective = 'cloze'; .*give --data"):
        evaluate(run / "best")


def test_the_pages_loss_trains_and_is_validated_as_language_is(run_page, write_config, tmp_path):
    register = (
        "from mixer.objectives.config import OBJECTIVES, Traits\n"
        'OBJECTIVES["focal"] = (Traits("mine:Focal"),)\n'
    )
    run_page(FOCAL + register)
    for name in ("language", "focal"):
        options = [f"name={name}", f"train.objective={name}", "train.steps=6"]
        train(load_config(str(write_config()), options))
    language, focal = (read_lines(tmp_path / "runs" / name) for name in ("language", "focal"))
    assert focal[0] == language[0] and "validation_loss" in focal[0], "untrained, they are the same"
    assert 0.9 < focal[1]["loss"] / language[1]["loss"] < 1
