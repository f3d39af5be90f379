"""accelerate's launcher on a CPU, and environments that name a rank without any launcher."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from runs import ROOT

from mixer.common.errors import UserError
from mixer.common.locks import run_locked
from mixer.distributed import launch as launching

ACCELERATE = str(Path(sys.executable).with_name("accelerate"))
MODULE = [sys.executable, "-m", "accelerate.commands.launch"]
OWN_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_machines: 1
num_processes: 2
use_cpu: true
"""


@pytest.fixture
def launched_by(monkeypatch):
    """A function: how many processes this one would start, as the child of such a command line."""

    def processes(*words: str) -> int:
        parent = SimpleNamespace(cmdline=lambda: list(words))
        child = SimpleNamespace(parent=lambda: parent)
        started = []
        monkeypatch.setattr(launching.psutil, "Process", lambda: child)
        monkeypatch.setattr(launching, "_end_with_launcher", lambda pid: None)
        monkeypatch.setattr(launching, "_run", lambda processes: started.append(processes) or 0)
        try:
            launching.start_asked_for_processes()
        except SystemExit:
            return started[0]
        return 1

    return processes


@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable, ACCELERATE, "launch", "--cpu", "--num_processes", "3"],
        [sys.executable, "-u", f"{ACCELERATE}-launch", "--num-processes=3", "--cpu"],
        [*MODULE, "--num_processes", "3"],
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes=3"],
    ],
)
def test_every_form_of_accelerate_launch_starts_the_processes_that_it_is_asked_for(
    launched_by, launcher
):
    assert launched_by(*launcher, "train.py", "--config", "launch") == 3
    assert launched_by(sys.executable, "launch", "--num_processes", "3", "train.py") == 1


@pytest.mark.parametrize(
    "asked", [["--cpu", "--num_processes=4", "--num_machines=2"], ["--num_processes=2"]], ids=str
)
def test_processes_that_cannot_be_had_are_refused(launched_by, monkeypatch, asked):
    monkeypatch.setattr(launching.torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", str("--cpu" in asked))
    with pytest.raises(UserError, match="asked for several processes.*start torchrun on each"):
        launched_by(*MODULE, *asked, "train.py")


def test_a_process_that_accelerate_started_through_another_program_is_refused(
    launched_by, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    assert launched_by("mpirun", "-n", "2", "python", "train.py") == 1
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(UserError, match="asked for several processes, and has started one"):
        launched_by("mpirun", "-n", "2", "python", "train.py")


def test_a_launcher_that_is_killed_takes_its_processes_with_it_and_they_save(
    write_config, tmp_path
):
    """accelerate passes no signal on, and cannot where it is killed. Its configuration file asks
    for two processes.
    """
    own = tmp_path / "own.yaml"
    own.write_text(OWN_FILE)
    options = ["train.steps=1000000", "train.eval_every=0", "checkpoint.save_every=0"]
    command = [*MODULE, "--config_file", str(own), "train.py", "--config", str(write_config())]
    run, output = tmp_path / "runs/small", tmp_path / "output.txt"
    with open(output, "w") as file:
        launcher = subprocess.Popen([*command, *options], cwd=ROOT, stdout=file, stderr=file)
    while not ((run / "metrics.jsonl").exists() and '"step": 5,' in read(run / "metrics.jsonl")):
        assert launcher.poll() is None, read(output)
        time.sleep(0.05)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(processes, timeout=60)
    for process in alive:
        process.kill()
    assert not alive and "2 processes on cpu" in read(output)
    (saved,) = run.glob("step-*")
    assert f"stopped by a signal after step {saved.name[5:]}" in read(output)
    with run_locked(run):  # raises where a process still holds it
        pass


def read(file: Path) -> str:
    return file.read_text()


COMPLETE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
COMPLETE |= {"MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("program", "environment"),
    [
        ("train", {"RANK": "16"}),
        ("eval", {"RANK": "16"}),
        ("train", {"LOCAL_RANK": "0"}),
        ("train", {"WORLD_SIZE": "2"}),
        ("train", COMPLETE | {"RANK": "abc"}),
        ("train", COMPLETE | {"RANK": "2"}),
        ("train", COMPLETE | {"MASTER_ADDR": ""}),
    ],
    ids=str,
)
def test_a_rank_without_a_launcher_is_refused_by_name(launch, program, environment):
    arguments = ("--checkpoint", "none") if program == "eval" else ()
    ranks = launch(*arguments, program=program, environment=environment)
    assert ranks.wait() == [2]
    (line,) = ranks.output.splitlines()
    said = " ".join(f"{name}={value}" for name, value in environment.items() if value)
    assert line.startswith("error: the environment has ") and "env -u " in line
    assert set(said.split()) <= set(line.replace(",", "").split())


def test_a_single_process_in_a_pod_and_a_job_trains_alone(write_config, launch):
    pod = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod", "MASTER_PORT": "1"}
    job = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3"}
    ranks = launch("--config", write_config(), "train.steps=4", environment=pod | job)
    assert "1 process on cpu" in ranks.succeed()
