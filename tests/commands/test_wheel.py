"""The package works where only its wheel is installed, without a checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import ROOT
from texts import corpus, made_texts

PROGRAM = """
import torch, mixer
from mixer.commands import doctor, train
from mixer.ops import triangular_conv

print(mixer.__file__)
x, weight = torch.randn(2, 5, 8), torch.randn(1, 1, 5, 5)
y = triangular_conv(x, weight, torch.zeros(1, 5), backend="dense")
torch.testing.assert_close(y, weight[0, 0].tril() @ x)
train.main()
doctor.main([])
"""
SMALL = (
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.max_position_embeddings=16"),
    *("data.source=text", "data.path=texts", "data.directory=data", "data.vocab_size=270"),
    *("data.validation_fraction=0.2", "train.steps=2", "train.batch_size=2", "logging.log_every=1"),
    *("train.eval_samples=2", "optim.warmup_steps=1", "checkpoint.save_last=false"),
)


@pytest.fixture
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


def test_the_operator_training_the_doctor_and_the_kernels_sources_are_installed(
    installed, tmp_path
):
    corpus(tmp_path / "texts", made_texts(30))
    environment = os.environ | {"PYTHONPATH": str(installed), "MIXER_CACHE": str(tmp_path / "c")}
    command = [sys.executable, "-c", PROGRAM, *SMALL]
    how = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **how)
    assert done.returncode in (0, 1), done.stderr
    place, _, said = done.stdout.partition("\n")
    assert Path(place) == installed / "mixer" / "__init__.py"
    assert "step 2/2" in said and f"torch: {torch.__version__}" in said
    assert '"step": 2,' in (tmp_path / "runs/run/metrics.jsonl").read_text()
    arguments = [sys.executable, "-X", "importtime", installed / "bin" / "mixer", "train", "a=1"]
    script = subprocess.run(arguments, cwd=tmp_path, env=environment, **how)
    assert script.returncode == 2 and "unknown key a" in script.stderr
    assert not re.search(r"\| +torch$", script.stderr, re.MULTILINE)
    sources = {file.name for file in (ROOT / "mixer/ops/csrc").iterdir()}
    assert {file.name for file in (installed / "mixer/ops/csrc").iterdir()} == sources
