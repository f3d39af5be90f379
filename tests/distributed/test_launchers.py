"""accelerate's launcher on a CPU, and environments that name a rank without any launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from launching import ROOT
from runs import refusal

from mixer.distributed.world import build_accelerator

OWN_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_machines: 1
num_processes: 2
use_cpu: true
"""


def test_several_processes_of_accelerate_on_a_cpu_are_refused(launch, write_config, tmp_path):
    """It starts one, with the environment that it makes here. Its configuration file asks for
    two.
    """
    (tmp_path / "own.yaml").write_text(OWN_FILE)
    command = ["--config_file", str(tmp_path / "own.yaml"), "train.py"]
    asked, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    made = prepare_simple_launcher_cmd_env(asked)[1].items() - os.environ.items()
    ranks = launch("--config", write_config(), environment=dict(made))
    assert ranks.wait() == [2] and not (tmp_path / "runs").exists()
    assert "error: accelerate launch was asked for several processes" in ranks.output
    # And is told of what the manual has, whose processes test_train starts.
    program = "torchrun --nproc_per_node=2 train.py"
    assert program in ranks.output and program in (ROOT / "docs/training.md").read_text()


COMPLETE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
COMPLETE |= {"MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("program", "environment"),
    [
        ("train", {"RANK": "16"}),
        ("eval", {"RANK": "16"}),
        ("train", {"LOCAL_RANK": "0"}),
        ("train", COMPLETE | {"RANK": "abc"}),
        ("train", COMPLETE | {"RANK": "2"}),
    ],
    ids=str,
)
def test_a_rank_without_a_launcher_is_refused_by_name(launch, program, environment):
    arguments = ("--checkpoint", ".") if program == "eval" else ()
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


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_TORCH_DEVICE", "cuda:99"),
        ("ACCELERATE_TORCH_DEVICE", "meta"),
        ("ACCELERATE_TORCH_DEVICE", "gpu"),
        ("ACCELERATE_DEBUG_MODE", "perhaps"),
    ],
)
def test_what_a_variable_of_accelerate_asks_for_in_vain_is_refused_by_name(
    write_config, monkeypatch, tmp_path, variable, value
):
    monkeypatch.setenv(variable, value)
    assert "accelerate cannot start" in (said := refusal(write_config()))
    assert f"{variable}={value}" in said and not (tmp_path / "runs").exists()


def test_the_variables_of_mpi_are_named_where_they_keep_a_cpu_from_training(write_config, launch):
    ranks = launch("--config", write_config(), environment={"PMI_SIZE": "4"})
    assert ranks.wait() == [2] and "PMI_SIZE=4" in ranks.output


def test_a_mac_trains_on_its_cpu_as_its_gpu_has_no_fp64(monkeypatch):
    monkeypatch.setattr(accelerate.state, "is_mps_available", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert build_accelerator("no").device.type == "cpu"


RANK = """
import time
from mixer.distributed.launcher import follow_launcher
follow_launcher()
print("ready", flush=True)
time.sleep(60)
"""
# Starts a rank, says its number when it is ready, and waits to be killed.
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
rank.stdout.readline()
print(rank.pid, flush=True)
rank.wait()
"""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "ends"),
    [
        ({}, False),
        (TORCHRUN, False),  # of a shell inside of a job: it has started nothing here
        (TORCHRUN | COMPLETE | {"LOCAL_WORLD_SIZE": "2"}, True),
        ({"ACCELERATE_DYNAMO_BACKEND": "no"}, True),
    ],
    ids=str,
)
def test_a_rank_ends_with_the_launcher_that_started_it_and_with_no_other(environment, ends):
    names = ("ACCELERATE_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    rank = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + (10 if ends else 0.5)
    while is_running(rank) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_running(rank) != ends
    if not ends:
        os.kill(rank, signal.SIGKILL)


def is_running(process: int) -> bool:
    """One that has ended, but that nobody has asked how, does not run."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
