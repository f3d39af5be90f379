"""A hundred steps give the losses that are written down."""

import json
from pathlib import Path

import golden_losses as golden
import pytest
import torch

FILES = Path(__file__).parent / "golden"
ON_GPU = {"environment": {"ACCELERATE_USE_CPU": "false"}}
IS_H200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
needs_h200 = pytest.mark.skipif(not IS_H200, reason="no H200 here")


@pytest.mark.parametrize(
    ("name", "launched"),
    [
        ("cpu_fp32", {}),
        pytest.param("h200_bf16", ON_GPU, marks=needs_h200),
        pytest.param("h200_fp16", ON_GPU, marks=needs_h200),
    ],
)
def test_a_hundred_steps_have_the_losses_that_are_written_down(launch, tmp_path, name, launched):
    written = json.loads((FILES / f"{name}.json").read_text())
    launch(*golden.run_settings(tmp_path, written["overrides"]), **launched).succeed()
    found = golden.read_result(tmp_path)
    assert found["tokens_sha256"] == written["tokens_sha256"], "the preparation has changed"
    assert len(found["train"]) == 100 and written["train"][0] - written["train"][-1] > 1
    # The same bits on the same kind of GPU with the same torch. Another torch may choose other
    # products, and another processor rounds otherwise.
    same = IS_H200 and torch.__version__ == written["torch"]
    tolerance = 2e-4 if name == "cpu_fp32" else 0 if same else 1e-3
    assert golden.largest_gap(found, written) <= tolerance
