"""The package works where only its wheel is installed, without a checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import ROOT

OPERATOR = """
import torch, mixer
from mixer.ops import triangular_conv

print(mixer.__file__)
x, weight = torch.randn(2, 5, 8), torch.randn(1, 1, 5, 5)
y = triangular_conv(x, weight, torch.zeros(1, 5), backend="dense")
torch.testing.assert_close(y, weight[0, 0].tril() @ x)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The directory that the wheel is installed into; it is built from a copy, so that no build
    output is left in the checkout.
    """
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mixer", source / "mixer", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    wheels = directory / "wheels"
    build = [*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", wheels, source]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = wheels.glob("*.whl")
    install = [*pip, "install", *alone, "--target", directory / "installed", wheel]
    subprocess.run(install, check=True, timeout=120)
    return directory / "installed"


@pytest.fixture
def python(installed, tmp_path):
    """A function that runs Python with the installed package alone, in an empty directory."""
    environment = os.environ | {"PYTHONPATH": str(installed), "MIXER_CACHE": str(tmp_path / "c")}

    def run(*arguments) -> subprocess.CompletedProcess:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )

    return run


@pytest.fixture
def config(tmp_path) -> Path:
    text = "a few words that are repeated, to learn them " * 20
    rows = [json.dumps({"text": f"{text}{number}"}) for number in range(10)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    sections = {
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 16},
        "data": {"source": "jsonl", "path": "texts.jsonl", "directory": "data", "vocab_size": 270}
        | {"validation_fraction": 0.2},
        "train": {"steps": 2, "batch_size": 2, "eval_samples": 2},
        "optim": {"warmup_steps": 1},
        "checkpoint": {"save_every": 0, "save_last": False},
        "logging": {"log_every": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "config.yaml"


def test_the_operator_and_the_sources_of_its_kernels_are_installed(installed, python):
    done = python("-c", OPERATOR)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == installed / "mixer" / "__init__.py"
    sources = {file.name for file in (ROOT / "mixer/ops/csrc").iterdir()}
    assert {file.name for file in (installed / "mixer/ops/csrc").iterdir()} == sources


def test_the_doctor_runs(python):
    done = python("-m", "mixer.doctor", "--json")
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["facts"]["torch"]


def test_a_model_is_trained(python, config, tmp_path):
    done = python("-m", "mixer.train", "--config", config)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert '"step": 2,' in (tmp_path / "runs/run/metrics.jsonl").read_text()
