"""The package works where only its wheel is installed, without a checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import ROOT
from texts import corpus, made_texts

OPERATOR_AND_DOCTOR = """
import torch, mixer
from mixer.doctor import main
from mixer.ops import triangular_conv

print(mixer.__file__)
x, weight = torch.randn(2, 5, 8), torch.randn(1, 1, 5, 5)
y = triangular_conv(x, weight, torch.zeros(1, 5), backend="dense")
torch.testing.assert_close(y, weight[0, 0].tril() @ x)
main([])
"""
SMALL = (
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.max_position_embeddings=16"),
    *("data.source=text", "data.path=texts", "data.directory=data", "data.vocab_size=270"),
    *("data.validation_fraction=0.2", "train.steps=2", "train.batch_size=2", "logging.log_every=1"),
    *("train.eval_samples=2", "optim.warmup_steps=1", "checkpoint.save_last=false"),
)


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


def test_the_operator_the_doctor_and_the_sources_of_the_kernels_are_installed(installed, python):
    done = python("-c", OPERATOR_AND_DOCTOR)
    assert done.returncode in (0, 1), done.stderr
    place, _, said = done.stdout.partition("\n")
    assert Path(place) == installed / "mixer" / "__init__.py"
    assert said.startswith(f"torch: {torch.__version__}")
    sources = {file.name for file in (ROOT / "mixer/ops/csrc").iterdir()}
    assert {file.name for file in (installed / "mixer/ops/csrc").iterdir()} == sources


def test_a_model_is_trained(python, tmp_path):
    corpus(tmp_path / "texts", made_texts(30))
    done = python("-m", "mixer.train", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert '"step": 2,' in (tmp_path / "runs/run/metrics.jsonl").read_text()
