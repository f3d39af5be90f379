"""Files appear whole or not at all, where their path leads, and are compared with their SHA-256; a
JSON file that is not what it should be is one message.
"""

import errno
import fcntl
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from mixer.common import files
from mixer.common.errors import UserError
from mixer.common.files import (
    check_new,
    check_writable,
    has_sha256,
    locked,
    read_json,
    sha256,
    whole_directory,
    write_text,
)


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
        with pytest.raises(UserError, match="output is not a directory; choose another"):
            check_new(tmp_path / place)


def test_a_folder_whose_name_is_no_text_is_refused_before_any_work(tmp_path):
    """tokenizers cannot write there, and would say so after the model is written."""
    with pytest.raises(UserError, match=r"\\udc80.*not UTF-8 text; choose another --output"):
        check_writable(tmp_path / Path(os.fsdecode(b"out\x80")) / "model")


def test_nothing_is_written_into_a_checkpoint(tmp_path):
    """Which every command, and the next resume, would then refuse."""
    (tmp_path / "step-4/trainer_state").mkdir(parents=True)
    for place in ("step-4/exported", "step-4/new/evaluation"):
        with pytest.raises(UserError, match="step-4 is a checkpoint.*; choose another --output"):
            check_writable(tmp_path / place)
    check_writable(tmp_path / "evaluation")


@pytest.mark.parametrize("locks", ["reach other hosts", "are a host's own", "are missing"])
def test_what_a_killed_process_of_another_host_has_left_goes_where_locks_reach_it(
    tmp_path, monkeypatch, locks
):
    """As where a job is queued again. Where they do not, that process may still write."""
    outputs = "data", "my@data", "more.data"
    for output in outputs:
        (tmp_path / f".partial-node1.cluster@{output}").mkdir()
    own = {
        "fstype": "lustre",
        "opts": "rw,localflock" if locks == "are a host's own" else "rw,flock",
    }
    mounts = [SimpleNamespace(mountpoint=str(tmp_path), **own)]
    mounts.append(SimpleNamespace(mountpoint="/", fstype="ext4", opts="rw"))
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    if locks == "are missing":
        error = OSError(errno.ENOSYS, "Function not implemented")
        monkeypatch.setattr(fcntl, "flock", MagicMock(side_effect=error, __name__="flock"))
    with whole_directory(tmp_path / "data") as stage:
        (stage / "train.bin").write_text("whole")
    assert (tmp_path / "data/train.bin").read_text() == "whole"
    left = outputs[1:] if locks == "reach other hosts" else outputs
    expected = {f".partial-node1.cluster@{output}" for output in left}
    assert {path.name for path in tmp_path.glob(".partial-*")} == expected


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(tmp_path):
    file = tmp_path / ".lock"
    with open(file, "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)

        def end() -> None:
            file.rename(tmp_path / ".nfs1")  # as NFS removes what another process has open
            fcntl.flock(holder, fcntl.LOCK_UN)

        with locked(file, end):
            assert file.exists()


def test_locks_in_a_folder_that_comes_and_goes_with_them_are_taken_one_at_a_time(tmp_path):
    lock, held = tmp_path / "a/b/c/.lock", []

    def take(_) -> None:
        with locked(lock, lambda: None):
            held.append(1)
            assert len(held) == 1
            held.pop()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(take, range(1000)))
    assert not lock.exists()


def test_a_file_is_compared_with_its_sha256_once_until_it_changes(tmp_path, monkeypatch, capsys):
    file, read = tmp_path / "file", []
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "LARGE", 10)
    monkeypatch.setattr(files, "sha256", lambda path: read.append(path) or sha256(path))
    file.write_bytes(b"a" * 1000)
    good = hashlib.sha256(b"a" * 1000).hexdigest()
    assert all(has_sha256(file, good) for _ in range(3)) and len(read) == 1
    assert capsys.readouterr().err.count(f"checking the SHA-256 of {file} ") == 1
    assert not has_sha256(file, "0" * 64) and not has_sha256(file, "0" * 64) and len(read) == 3
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(b"a" * 999 + b"b")
    os.utime(file, ns=times)  # as a copy that keeps times would
    assert not has_sha256(file, good)
    file.write_bytes(b"a" * 1000)
    monkeypatch.setenv("MIXER_CACHE", str(file))  # a cache that cannot be used
    assert has_sha256(file, good) and has_sha256(file, good) and len(read) == 6


WRONG = {
    b'{"size": 1': "is damaged (JSONDecodeError: ",
    b'{"size": 1, "name": "\xff"}': "is damaged (UnicodeDecodeError: ",
    b"[" * 100_000: "is damaged (RecursionError: ",
    b"[1]": "it holds list, allowed: an object with keys",
    b'{"name": "x"}': "size missing",
    b'{"size": true, "name": null}': "size = True; allowed: a whole number",
    b'{"size": 1, "name": 2}': "name = 2; allowed: text in quotes or null",
    b'{"size": 1, "name": "x", "other": {"deep": ["\\ud800"]}}': "surrogates not allowed",
    b'{"size": 1, "name": "a\\u0000"}': "it holds a null character",
}


@pytest.mark.parametrize(("content", "problem"), WRONG.items(), ids=range(len(WRONG)))
def test_what_is_wrong_is_named(tmp_path, content, problem):
    file = tmp_path / "notes.json"
    file.write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_json(file, "copy it again", {"size": int, "name": str | None})
    message = str(raised.value)
    assert message.startswith(f"{file} ") and message.endswith(": copy it again")
    assert problem in message
