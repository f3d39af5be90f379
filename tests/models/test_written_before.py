"""Saved models of an earlier version load and compute what they computed then: as this package's
model, and with trust_remote_code by the code that was saved with them.
"""

import os
import subprocess
import sys

import pytest
import torch
from runs import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mixer import MaskedMixerForCausalLM
from mixer.checkpoints.pretrained import load_masked_mixer

BEFORE = ROOT / "tests/checkpoints/written_before"
SAVED = {"small": BEFORE / "runs/small/step-4", "variant": BEFORE / "variant"}

LOAD_WITHOUT_THE_PACKAGE = """
import sys, torch
sys.modules["mixer"] = None  # as if it were not installed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
expected = load_file("{logits}")
for name, directory in {saved}.items():
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        logits = model(expected["ids"]).logits
    torch.testing.assert_close(logits, expected[name], rtol=0, atol=1e-5)
"""


@pytest.mark.parametrize("name", SAVED)
def test_an_earlier_model_has_its_logits(name):
    expected = load_file(BEFORE / "logits.safetensors")
    for model in (
        AutoModelForCausalLM.from_pretrained(SAVED[name]),
        load_masked_mixer(SAVED[name], "which is not a masked mixer").eval(),
    ):
        assert type(model) is MaskedMixerForCausalLM
        with torch.no_grad():
            logits = model(expected["ids"]).logits
        torch.testing.assert_close(logits, expected[name], rtol=0, atol=1e-5)


def test_an_earlier_model_loads_by_its_own_code_where_the_package_is_not_installed(tmp_path):
    saved = {name: str(directory) for name, directory in SAVED.items()}
    code = LOAD_WITHOUT_THE_PACKAGE.format(logits=BEFORE / "logits.safetensors", saved=saved)
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
