"""A hundred steps give the losses that are written down."""

import json
from pathlib import Path

import golden_losses as golden
import pytest

FILE = Path(__file__).parent / "golden" / "cpu_fp32.json"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_hundred_steps_on_a_cpu_in_fp32(launch, tmp_path, processes):
    written = json.loads(FILE.read_text())
    options = [f"train.batch_size={golden.SETTINGS['train']['batch_size'] // processes}"]
    launch(*golden.run_settings(tmp_path, options), processes=processes).succeed()
    assert golden.tokens_sha256(tmp_path) == written["tokens_sha256"], "other tokens: the tokenizer or the preparation changed"
    found = golden.read_result(tmp_path)
    assert len(found["train"]) == 100 and written["train"][0] - written["train"][-1] > 1
    assert golden.largest_gap(found, written) < 2e-4  # another processor rounds otherwise
