"""Ending early: signals, and processes that die."""

import itertools
import logging
import os
import pty
import signal
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from launching import start_python
from runs import read_lines

from mixer.checkpoints.checkpoint import all_checkpoints, damage, step_of
from mixer.common.files import run_locked

LONG = {"steps": 1_000_000, "batch_size": 4, "eval_every": 0, "eval_samples": 8}


def last_saved(run: Path) -> int:
    (saved,) = all_checkpoints(run)
    assert damage(saved) is None
    return step_of(saved)


def has_done(run: Path, step: int) -> bool:
    return f'"step": {step},' in (run / "metrics.jsonl").read_text()


def started(launch, config, tmp_path, processes: int, *options, before=None):
    run = tmp_path / "runs/small"
    command = ("--config", config, "checkpoint.save_every=0", *options)
    ranks = launch(*command, processes=processes, before=before)
    return ranks.until(lambda: (run / "metrics.jsonl").exists() and has_done(run, 5))


EACH = [(signal.SIGTERM, 1), (signal.SIGINT, 2), (signal.SIGUSR1, 2), (signal.SIGHUP, 1)]


@pytest.mark.parametrize(("number", "processes"), EACH)
def test_a_signal_to_any_one_process_saves_and_ends_all_with_success(
    write_config, launch, tmp_path, number, processes
):
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # these may run under nohup
    ranks = started(launch, write_config(train=LONG), tmp_path, processes, before=heard)
    began, before = time.monotonic(), read_lines(tmp_path / "runs/small")[-1]["step"]
    output = ranks.signal(number, rank=processes - 1).succeed()
    assert time.monotonic() - began < 20
    step = last_saved(tmp_path / "runs/small")
    assert ("stopping after this step" in output) == (processes == 1)
    assert f"stopped by a signal after step {step}" in output
    # no step after the saved one
    assert read_lines(tmp_path / "runs/small")[-1]["step"] == step >= before


def print_to(opened: tuple[int, int]) -> None:
    """The reader of what this process prints has gone: `opened` are its end and this process's."""
    reader, writer = opened
    for stream in (sys.stdout, sys.stderr):
        os.dup2(writer, stream.fileno())
    os.close(reader)
    os.close(writer)


def warn_at_each_step() -> None:
    """Other libraries print, too."""
    from mixer.training import loop

    real = loop.learning_rate

    def learning_rate(*arguments):
        print("a progress bar", file=sys.stderr)
        logging.getLogger().error("a line of a log")
        return real(*arguments)

    logging.basicConfig(force=True)
    loop.learning_rate = learning_rate


def tee_has_ended() -> None:
    print_to(os.pipe())
    warn_at_each_step()


def terminal_is_closed() -> None:
    print_to(pty.openpty())
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these may run under nohup
    warn_at_each_step()


@pytest.mark.parametrize(
    ("gone", "number"), [(tee_has_ended, signal.SIGINT), (terminal_is_closed, signal.SIGHUP)]
)
def test_a_signal_saves_and_ends_with_success_where_the_reader_of_the_output_has_gone(
    write_config, launch, tmp_path, gone, number
):
    """Ctrl-C reaches all of `train.py | tee log`, and tee is gone at once."""
    ranks = started(launch, write_config(train=LONG), tmp_path, 1, before=gone)
    assert ranks.signal(number).wait() == [0]
    step = last_saved(tmp_path / "runs/small")
    assert step == read_lines(tmp_path / "runs/small")[-1]["step"] >= 5


def test_a_run_under_nohup_goes_on_when_its_terminal_closes(write_config, launch, tmp_path):
    config = write_config(train=LONG | {"steps": 12})
    under_nohup = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    ranks = launch("--config", config, before=under_nohup)
    ranks.until((tmp_path / "runs/small/metrics.jsonl").exists)
    assert "stopped" not in ranks.signal(signal.SIGHUP).succeed()


def test_a_second_signal_leaves_at_once_but_not_one_passed_on_by_a_launcher(
    write_config, launch, tmp_path
):
    ranks = started(launch, write_config(train=LONG), tmp_path, 1)
    assert ranks.signal(signal.SIGTERM).signal(signal.SIGTERM).wait() == [0]  # the same one, twice

    endless = launch("--config", write_config(train=LONG, name="endless"), before=steps_without_end)
    endless.until((tmp_path / "runs/endless/metrics.jsonl").exists)
    time.sleep(0.5)
    endless.signal(signal.SIGINT)
    time.sleep(1.5)
    assert endless.running()
    assert endless.signal(signal.SIGINT).wait() == [-signal.SIGINT]


def steps_without_end() -> None:
    from mixer.training import loop

    loop.learning_rate = lambda *arguments: [time.sleep(0.1) for _ in range(600)]


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ACCELERATE = ["accelerate.commands.launch", "--cpu", "--num_processes=1"]


@pytest.mark.parametrize(
    ("launcher", "number", "said"),
    [
        (TORCHRUN, signal.SIGTERM, "2 processes on cpu"),
        (ACCELERATE, signal.SIGKILL, "1 process on cpu"),
    ],
    ids=["torchrun", "accelerate"],
)
def test_the_processes_of_a_launcher_that_is_ended_save_and_end(
    write_config, tmp_path, launcher, number, said
):
    """torchrun passes signals on and waits for its processes; accelerate does neither."""
    command = [*launcher, "train.py", "--config", str(write_config(train=LONG))]
    # Beside accelerate's launcher nobody says that a run is for CPUs.
    on_cpu = {"ACCELERATE_USE_CPU": str(torch.cuda.is_available()).lower()}
    run, output = tmp_path / "runs/small", tmp_path / "output.txt"
    options = ["checkpoint.save_every=0"]
    launched = start_python("-m", *command, *options, output=output, **on_cpu)
    while not ((run / "metrics.jsonl").exists() and has_done(run, 5)):
        assert launched.is_alive(), output.read_text()
        time.sleep(0.05)
    processes = psutil.Process(launched.pid).children(recursive=True)
    os.kill(launched.pid, number)
    launched.join(60)
    _, alive = psutil.wait_procs(processes, timeout=60)
    for process in alive:
        process.kill()
    assert not alive and said in output.read_text()
    assert f"stopped by a signal after step {last_saved(run)}" in output.read_text()
    with run_locked(run):  # raises where a process still holds it
        pass


def second_process_fails() -> None:
    from mixer.objectives import language

    real, calls = language.token_nats, itertools.count()

    def token_nats(*arguments):
        if os.environ["RANK"] == "1" and next(calls) > 5:
            raise RuntimeError("a fault of process one alone")
        return real(*arguments)

    language.token_nats = token_nats


def test_a_process_that_fails_ends_the_others_and_its_error_is_the_one_shown(write_config, launch):
    config = write_config(train=LONG)
    ranks = launch("--config", config, processes=2, before=second_process_fails)
    assert ranks.wait() == [1, 1]
    assert "process 1 failed:\nTraceback (most recent call last)" in ranks.output
    assert ranks.output.count("RuntimeError: a fault of process one alone") == 1
    assert "process 0 failed" not in ranks.output


def test_a_process_that_is_killed_ends_the_others(write_config, launch, tmp_path):
    """The launcher names the one that was killed."""
    ranks = started(launch, write_config(train=LONG), tmp_path, 2)
    began = time.monotonic()
    ranks.signal(signal.SIGKILL, rank=1)
    ranks.ranks[0].join(60)
    assert ranks.ranks[0].exitcode == 1 and time.monotonic() - began < 30


def test_a_configuration_error_is_shown_once_by_several_processes(write_config, launch):
    ranks = launch("--config", write_config(), "train.stepz=3", processes=2)
    assert ranks.wait() == [2, 2]
    assert ranks.output.count("unknown key train.stepz") == 1
    refused = launch("--config", write_config(), "data.directory=/proc/nothing", processes=2)
    assert 0 not in refused.wait()
    assert refused.output.count("nothing could not be written") == 1
