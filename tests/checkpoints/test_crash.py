"""Checkpoints that survive: kills in mid-save, full disks, directories without access, damage, and
slow disks.
"""

import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import time
from pathlib import Path

import pytest
from runs import read_lines, read_timeless

from mixer.checkpoints import writer
from mixer.checkpoints.checkpoint import (
    LISTING,
    OPTIMIZER,
    all_checkpoints,
    damage,
    find_resume,
    link_best,
    prune,
    step_of,
)
from mixer.common.errors import UserError


def good_steps(run: Path) -> list[int]:
    return [step_of(path) for path in all_checkpoints(run) if damage(path) is None]


def flip_a_bit(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[5000] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


HARMS = {
    "flipped bit": (flip_a_bit, "model.safetensors is not what was written"),
    "missing": (lambda step: (step / OPTIMIZER).unlink(), "optimizer-1-of-1.* cannot be read"),
    "listing cut": (lambda step: (step / LISTING).write_text('{"mod'), "files.json is damaged"),
}


@pytest.mark.parametrize(("harm", "named"), HARMS.values(), ids=HARMS)
def test_a_damaged_checkpoint_is_passed_over_named_and_replaced(
    write_config, finished, launch, harm, named
):
    good = (finished / "step-12/model.safetensors").read_bytes()
    harm(finished / "step-12")
    for run in (finished, finished.parent / "new"):
        with pytest.raises(UserError, match=f"not be used .*step-12: .*{named}.*give another"):
            find_resume(run, str(finished / "step-12"))
    lines = []
    assert find_resume(finished, "auto", lines.append) == finished / "step-8"
    assert len(lines) == 1 and re.search(named, lines[0])
    harm_only = shutil.copytree(finished / "step-12", finished.parent / "other/step-12")
    with pytest.raises(UserError, match="the checkpoint cannot be used .*choose another name"):
        find_resume(harm_only.parent, "auto", lines.append)
    if harm is flip_a_bit:  # and once through the whole of train.py
        output = launch("--config", write_config()).succeed()
        assert output.count("skipping") == 1 and f"resuming {finished / 'step-8'}" in output
        assert (finished / "step-12/model.safetensors").read_bytes() == good
        assert good_steps(finished) == [8, 12]


def test_a_kill_between_any_two_changes_to_the_disk_leaves_a_good_checkpoint(
    write_config, launch, tmp_path
):
    """Each run dies at another of the system calls that a save makes: renames, syncs, links and
    deletions.
    """
    changes = ("checkpoint.save_every=2", "train.steps=6", "train.eval_every=2")
    command = ("--config", write_config(), *changes)
    launch(*command, "name=whole").succeed()
    run, place, survived = tmp_path / "runs/small", 0, 0
    while place < 300:
        before = good_steps(run)
        ranks = launch(*command, environment={"DIE_AT": str(place)}, before=die_at_a_change)
        code = ranks.wait()[0]
        assert code in (0, -signal.SIGKILL), ranks.output
        after = good_steps(run)
        assert not before or after[-1] >= before[-1]
        assert not (run / "best").is_symlink() or damage(run / "best") is None
        if code == 0:
            break
        survived += 1
        place += 5
    assert survived > 5 and after[-1] == 6
    assert read_timeless(run) == read_timeless(tmp_path / "runs/whole")


def die_at_a_change() -> None:
    """SIGKILL to itself before the n-th call that changes what is on the disk."""
    left = int(os.environ["DIE_AT"])

    def counted(function):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in ("rename", "replace", "fsync", "mkdir", "rmdir", "symlink"):
        setattr(os, name, counted(getattr(os, name)))
    writer.save_file = counted(writer.save_file)


def test_a_full_disk_ends_the_run_and_with_space_it_goes_on_exactly(
    write_config, launch, small_disk, tmp_path
):
    config = write_config(train={"steps": 12, "batch_size": 8, "eval_every": 0, "eval_samples": 8})
    launch("--config", config, "name=whole").succeed()
    # This leaves room for two checkpoints (0.7 MB each), not for the third beside them.
    (small_disk / "filler").write_bytes(b"x" * 900_000)
    ranks = launch("--config", config, f"output_dir={small_disk}", "checkpoint.save_every=3")
    assert ranks.wait() == [2]
    assert "No space left on device" in ranks.output and "Traceback" not in ranks.output
    good = good_steps(small_disk / "small")
    assert good and "it continues from the last save" in ranks.output
    (small_disk / "filler").unlink()
    again = launch("--config", config, f"output_dir={small_disk}").succeed()
    assert f"resuming {small_disk / 'small'}/step-{good[-1]}" in again
    assert read_timeless(small_disk / "small") == read_timeless(tmp_path / "runs/whole")


def test_pruning_keeps_the_newest_the_best_and_every_nth(tmp_path):
    for step in range(10, 110, 10):
        (tmp_path / f"step-{step}").mkdir()
    link_best(tmp_path, {20: 1.5, 30: 1.2, 35: 0.1, 40: float("nan"), 50: 1.3, 60: None})
    assert os.readlink(tmp_path / "best") == "step-30"  # 35 has no checkpoint, 40 no loss
    prune(tmp_path, last=90, keep=2, keep_every=40)
    assert sorted(map(step_of, tmp_path.glob("step-*"))) == [30, 40, 80, 90, 100]
    link_best(tmp_path, {30: 1.2, 40: 0.0})
    assert os.readlink(tmp_path / "best") == "step-40"


LACKING = {
    "flock": errno.ENOSYS,  # as on Lustre, and in some containers
    "chmod": errno.EPERM,  # as on FUSE and some NFS
    "fsync": errno.EINVAL,  # of directories, as on SMB
    "symlink": errno.EPERM,  # as on exFAT
}


def lack_all() -> None:
    for name, number in LACKING.items():
        lack(fcntl if name == "flock" else os, name, number)


def lack(module, name: str, number: int) -> None:
    real = getattr(module, name)

    def refused(what, *arguments, **options):
        if name == "fsync" and not stat.S_ISDIR(os.fstat(what).st_mode):
            return real(what, *arguments)
        raise OSError(number, os.strerror(number))

    refused.__name__ = name
    setattr(module, name, refused)


def test_a_run_goes_on_without_what_a_file_system_lacks_and_says_so_once(
    write_config, launch, tmp_path
):
    run = tmp_path / "runs/small"
    output = launch("--config", write_config(), before=lack_all).succeed()
    for name in ("flock", "chmod", "fsync"):
        assert output.count(f"warning: a file system refuses {name} (") == 1
    assert "a file system refuses symlink (" in output and f"there is no {run / 'best'}" in output
    assert good_steps(run)


def slow_disk() -> None:
    """Writing a checkpoint's two large files takes 1.2 s longer."""
    real = writer.save_file

    def slowly(*arguments, **options):
        time.sleep(0.6)
        real(*arguments, **options)

    writer.save_file = slowly


def test_training_goes_on_while_a_checkpoint_is_written(write_config, launch, tmp_path):
    options = ["train.steps=2000", "train.eval_every=0", "checkpoint.save_every=5"]
    ranks = launch("--config", write_config(), *options, before=slow_disk)
    ranks.until((tmp_path / "runs/small/step-5").exists)
    lines = [line for line in read_lines(tmp_path / "runs/small") if "loss" in line]
    assert len(lines) >= 10  # 10, where the next save waits for this one
    assert max(line["seconds"] for line in lines[5:9]) < 0.5
    ranks.stop()
    # The stop waits for the save that was under way, and saves no other.
    last = max(line["step"] for line in read_lines(tmp_path / "runs/small"))
    assert good_steps(tmp_path / "runs/small")[-1] in (last, last - last % 5)


def fail_in_the_thread() -> None:
    def failing(*arguments):
        raise ValueError("made to fail")

    writer.save_file = failing


def test_an_error_of_the_writing_thread_ends_the_run_at_the_next_step(
    write_config, launch, tmp_path
):
    options = ("train.steps=100000", "train.eval_every=0", "checkpoint.save_every=500")
    ranks = launch("--config", write_config(), *options, before=fail_in_the_thread)
    assert ranks.wait() == [1]
    assert "ValueError: made to fail" in ranks.output
    assert 500 <= read_lines(tmp_path / "runs/small")[-1]["step"] < 900
