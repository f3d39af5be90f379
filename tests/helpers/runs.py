"""Runs of train.py in real processes, and what they leave: their metrics and checkpoints."""

import json
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from mixer.common.errors import UserError

ROOT = Path(__file__).parents[2]
# Environment of a launch that shards the model's weights.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
# Overrides for all that is not AdamW on a plain masked mixer: Muon, heads, mixing weights by lag, a
# first mixing matrix that shifts.
RECIPE = (
    "optim.name=muon",
    "model.mixing_weight=lags",
    "model.mixing_init=shift",
    "model.num_mixer_heads=2",
)
TIMES = {"seconds", "tokens_per_second", "useful_tflops", "peak_share"}
TIMES |= {"data_wait_share", "peak_memory_gb"}


def read_lines(run_directory: Path) -> list[dict]:
    text = (run_directory / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def read_timeless(run_directory: Path) -> list[dict]:
    """What metrics.jsonl says of each step, without the times: the same for every exact repetition
    of a run.
    """
    lines = read_lines(run_directory)
    return [{key: line[key] for key in line if key not in TIMES} for line in lines]


def read_losses(run_directory: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(run_directory) if "loss" in line}


def state_files(checkpoint: Path) -> dict[str, bytes]:
    """All that training goes on from, byte for byte."""
    files = (file for file in checkpoint.rglob("*") if file.is_file())
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in files}


def assert_same(run: Path, reference: Path, step: int) -> None:
    """The same last checkpoint, every file of it, and the same lines of metrics: none doubled,
    missing or different.
    """
    files = state_files(run / f"step-{step}")
    expected = state_files(reference / f"step-{step}")
    assert files.keys() == expected.keys()
    assert [name for name in expected if files[name] != expected[name]] == []
    assert read_timeless(run) == read_timeless(reference)
    assert not list(run.glob("*.partial"))


def killed_after(run: Path, step: int, name: str) -> Path:
    """A copy of a run under another name, as a kill after its checkpoint of `step` leaves it."""
    copy = shutil.copytree(run, run.with_name(name), symlinks=True)
    for checkpoint in copy.glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    (copy / "best").unlink(missing_ok=True)
    return copy


def refusal(config: Path, *overrides: str) -> str:
    """The line with which a run is refused."""
    from mixer.training.config import load_config
    from mixer.training.loop import train

    with pytest.raises(UserError, match="^.*$") as error:
        train(load_config(str(config), [*overrides]))
    return str(error.value)


@contextmanager
def file_limit(size: int):
    """No file can grow beyond `size` bytes: the error comes from the system, as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
