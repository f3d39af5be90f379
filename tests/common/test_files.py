"""Files appear whole or not at all, where their path leads."""

import os
from pathlib import Path

import pytest

from mixer.common.errors import UserError
from mixer.common.files import check_new, check_writable, write_text


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    scratch, link = tmp_path / "scratch" / "metrics.jsonl", tmp_path / "metrics.jsonl"
    scratch.parent.mkdir()
    scratch.write_text("old")
    link.symlink_to(scratch)
    write_text(link, "new")
    assert link.is_symlink() and scratch.read_text() == "new"
    assert {path.name for path in tmp_path.rglob("*")} == {"scratch", "metrics.jsonl"}


@pytest.mark.parametrize("target", ["output", "gone"])
def test_a_link_that_leads_nowhere_is_refused_before_any_work(tmp_path, target):
    (tmp_path / "output").symlink_to(target)
    for place in ("output", "output/new"):
        with pytest.raises(UserError, match="output is no directory; choose another"):
            check_new(tmp_path / place)


def test_a_folder_whose_name_is_no_text_is_refused_before_any_work(tmp_path):
    """tokenizers cannot write there, and would say so after the model is written."""
    with pytest.raises(UserError, match=r"\\udc80.*no UTF-8 text; choose another --output"):
        check_writable(tmp_path / Path(os.fsdecode(b"out\x80")) / "model")


def test_nothing_is_written_into_a_checkpoint(tmp_path):
    """Which every command, and the next resume, would then refuse."""
    (tmp_path / "step-4/trainer_state").mkdir(parents=True)
    for place in ("step-4/exported", "step-4/new/evaluation"):
        with pytest.raises(UserError, match="step-4 is a checkpoint.*; choose another --output"):
            check_writable(tmp_path / place)
    check_writable(tmp_path / "evaluation")
