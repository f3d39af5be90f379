"""A hundred steps give the losses that are written down."""

import json
from pathlib import Path

import golden_losses as golden
import pytest
import torch

FILES = Path(__file__).parent / "golden"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_hundred_steps_on_a_cpu_in_fp32(launch, tmp_path, processes):
    written = json.loads((FILES / "cpu_fp32.json").read_text())
    options = [f"train.batch_size={golden.SETTINGS['train']['batch_size'] // processes}"]
    launch(*golden.run_settings(tmp_path, options), processes=processes).succeed()
    assert golden.tokens_sha256(tmp_path) == written["tokens_sha256"], (
        "other tokens: the tokenizer or the preparation changed"
    )
    found = golden.read_result(tmp_path)
    assert len(found["train"]) == 100 and written["train"][0] - written["train"][-1] > 1
    assert golden.largest_gap(found, written) < 2e-4  # another processor rounds otherwise


@pytest.mark.skipif(
    not torch.cuda.is_available() or "H200" not in torch.cuda.get_device_name(),
    reason="no H200 here",
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_hundred_steps_on_an_h200(launch, tmp_path, precision):
    written = json.loads((FILES / f"h200_{precision}.json").read_text())
    arguments = golden.run_settings(tmp_path, written["overrides"])
    launch(*arguments, environment={"ACCELERATE_USE_CPU": "false"}).succeed()
    assert golden.tokens_sha256(tmp_path) == written["tokens_sha256"], (
        "other tokens: the tokenizer or the preparation changed"
    )
    found = golden.read_result(tmp_path)
    assert f"train.mixed_precision={precision}" in written["overrides"]
    # The same bits, where torch is the same; another one may choose other products, which round
    # otherwise.
    assert golden.largest_gap(found, written) <= (
        0 if torch.__version__ == written["torch"] else 1e-3
    )
