"""Ten billion tokens: start-up and memory, on a sparse file that takes no space."""

import json
import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from texts import config_of, made_texts, quiet

from mixer.common.files import note_of
from mixer.data.batches import SampleOrder
from mixer.data.prepare import prepare
from mixer.data.prepared import TokenFile, fingerprint

TOKENS = 10_000_000_000


def enlarge(directory: Path) -> None:
    """Gives prepared data a training split of ten billion tokens, all 0, of 1000 tokens a document.
    It counts as compared with its SHA-256, which would take a minute.
    """
    os.truncate(directory / "train.bin", 0)
    os.truncate(directory / "train.bin", 2 * TOKENS)
    np.arange(1000, TOKENS + 1, 1000, dtype="<u8").tofile(directory / "train.docs.bin")
    manifest = json.loads((directory / "manifest.json").read_text())
    train = manifest["splits"]["train"]
    train |= {"tokens": TOKENS, "documents": TOKENS // 1000}
    manifest["fingerprint"] = fingerprint(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    for name, kind in (("train.bin", "tokens"), ("train.docs.bin", "documents")):
        note = note_of(directory / name, train[f"{kind}_sha256"])
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


@pytest.mark.parametrize("packed", [True, False])
def test_opening_and_reading_ten_billion_tokens_takes_little_time_and_memory(tmp_path, packed):
    prepare(config_of(tmp_path, made_texts(20), packed=packed), quiet)
    enlarge(tmp_path / "prepared")
    process, began = psutil.Process(), time.monotonic()
    before = process.memory_info().rss  # with shared pages of files
    data = TokenFile(tmp_path / "prepared", "train", 512)
    order = SampleOrder(len(data), seed=0)
    inputs, targets = data.batch(order.indices(0, 64))
    assert time.monotonic() - began < 10
    assert len(data) == ((TOKENS - 1) // 512 if packed else TOKENS // 1000 * 2)
    for position in range(64, 64 * 300, 64):
        data.batch(order.indices(position, 64))
    # 300 MB were read; where the rows of all documents begin are 80 MB.
    assert (process.memory_info().rss - before) / 2**20 < 150
    assert inputs.shape == (64, 512)
    # A document has 999 targets, 512 of them in its first row.
    full = [512 if packed or index % 2 == 0 else 487 for index in order.indices(0, 64)]
    assert (targets != -100).sum(1).tolist() == full
