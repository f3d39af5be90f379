"""Files appear whole or not at all, where their path leads."""

from mixer.common.files import write_text


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    scratch, link = tmp_path / "scratch" / "metrics.jsonl", tmp_path / "metrics.jsonl"
    scratch.parent.mkdir()
    scratch.write_text("old")
    link.symlink_to(scratch)
    write_text(link, "new")
    assert link.is_symlink() and scratch.read_text() == "new"
    assert {path.name for path in tmp_path.rglob("*")} == {"scratch", "metrics.jsonl"}
