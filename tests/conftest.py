"""What several tests share: a small corpus prepared once, a small run on it, and the real commands
in real processes.
"""

import gc
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from launching import Launch

# One thread: small products are faster so, and the same on every machine. No hub, so that nothing
# waits for a network. Training on the CPU also where there is a GPU: what a GPU gives is measured
# by benchmarks/ and tests/training/golden_losses.py.
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    ACCELERATE_USE_CPU="true",
)

# With several workers (make test): files whose tests share something costly stay together. Those
# of one line also go to the same worker, so that no other waits for their build.
ON_ONE_WORKER = [
    {"test_build", "test_kernel_choice"},
    {"test_hopper_protocol"},
    {"test_ops_cuda", "test_mix_row_cuda", "test_train_cuda"},
]
LONGEST_FIRST = ("test_resume", "test_build", "test_wheel", "test_hopper_protocol", "test_train")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        for number, together in enumerate(ON_ONE_WORKER):
            if item.path.stem in together:
                item.add_marker(pytest.mark.xdist_group(f"files {number}"))
    # stable: so no worker is left alone with a long test
    items.sort(key=lambda item: item.path.stem not in LONGEST_FIRST)


def pytest_collection_finish():
    """What is imported stays: each training asks for several collections, which would look through
    all of it, for a quarter of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory):
    """A cache of this test run's own, for all of its workers: what a test finds there, this run has
    built.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXER_CACHE", str(shared / "kernel_cache"))
        yield shared / "kernel_cache/kernels"


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> dict:
    """Settings of a run of 12 steps, whose data (30 files of the standard library) is prepared on
    first use.
    """
    directory = tmp_path_factory.mktemp("data")
    return {
        "name": "small",
        "model": {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 32},
        "data": {
            "directory": str(directory / "small"),
            "vocab_size": 400,
            "max_documents": 30,
            "validation_fraction": 0.1,
        },
        "train": {"steps": 12, "batch_size": 8, "eval_every": 6, "eval_samples": 16},
        "optim": {"lr": 2e-3, "warmup_steps": 3},
        "checkpoint": {"save_every": 4},
        "logging": {"log_every": 1},
    }


@pytest.fixture
def write_config(small_run, tmp_path):
    """A function that writes the small run's YAML, runs going under tmp_path; returns its path."""

    def write(**changes) -> Path:
        path = tmp_path / "config.yaml"
        settings = small_run | {"output_dir": str(tmp_path / "runs")} | changes
        path.write_text(yaml.safe_dump(settings))
        return path

    return write


@pytest.fixture
def launch(tmp_path):
    """A function that starts ranks of train.py (see launching.py); what still runs at the test's
    end is killed.
    """
    launched = []

    def begin(*arguments, **options) -> Launch:
        launched.append(Launch(tmp_path / f"output-{len(launched)}.txt", *arguments, **options))
        return launched[-1]

    yield begin
    for each in launched:
        each.kill()


@pytest.fixture(scope="session")
def finished_once(small_run, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("finished")
    # JSON is YAML
    (directory / "config.yaml").write_text(json.dumps(small_run | {"output_dir": str(directory)}))
    Launch(directory / "output.txt", "--config", directory / "config.yaml").succeed()
    return directory / "small"


@pytest.fixture
def finished(finished_once, tmp_path) -> Path:
    """A run of 12 steps with checkpoints at 8 and 12, to change or damage at will."""
    return shutil.copytree(finished_once, tmp_path / "runs/small", symlinks=True)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2.4 MB; skips the test where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2400k", "tmpfs", disk]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here: that takes root's rights")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
