"""Ten billion tokens: start-up and memory, on a sparse file that takes no space."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mixer.common.files import note_of
from mixer.data.batches import SampleOrder
from mixer.data.prepare import prepare
from mixer.data.prepared import TokenFile, fingerprint
from mixer.training.config import load_config

TOKENS = 10_000_000_000
MIB = 2**20


@pytest.fixture(scope="module")
def large(small_run, tmp_path_factory) -> Path:
    """The small run's data with a training split of ten billion tokens, all 0, of 1000 tokens a
    document. It counts as compared with its SHA-256, which would take a minute.
    """
    config = tmp_path_factory.mktemp("large") / "config.yaml"
    config.write_text(json.dumps(small_run))
    prepare(load_config(str(config), []).data, say=lambda line: None)
    directory = shutil.copytree(small_run["data"]["directory"], config.parent / "data")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["splits"]["train"] |= {"tokens": TOKENS, "documents": TOKENS // 1000}
    sign(directory / "manifest.json", manifest)
    with open(directory / "train.bin", "r+b") as file:
        file.truncate(0)
        file.truncate(2 * TOKENS)
    np.arange(1000, TOKENS + 1, 1000, dtype="<u8").tofile(directory / "train.docs.bin")
    train = manifest["splits"]["train"]
    for name, kind in (("train.bin", "tokens"), ("train.docs.bin", "documents")):
        note = note_of(directory / name, train[f"{kind}_sha256"])
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    return directory


def sign(file: Path, manifest: dict) -> None:
    file.write_text(json.dumps(manifest | {"fingerprint": fingerprint(manifest)}))


def memory() -> int:
    """What this process holds, shared pages of files included, in bytes."""
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("packed", [True, False])
def test_opening_and_reading_ten_billion_tokens_takes_little_time_and_memory(
    large, tmp_path, packed
):
    directory = shutil.copytree(
        large, tmp_path / "data", copy_function=lambda source, to: Path(to).symlink_to(source)
    )
    manifest = json.loads((large / "manifest.json").read_text())
    manifest["settings"]["packed"] = packed
    (directory / "manifest.json").unlink()
    sign(directory / "manifest.json", manifest)
    before, began = memory(), time.monotonic()
    data = TokenFile(directory, "train", 512)
    order = SampleOrder(len(data), seed=0)
    inputs, targets = data.batch(order.indices(0, 64))
    assert time.monotonic() - began < 10
    assert len(data) == ((TOKENS - 1) // 512 if packed else TOKENS // 1000 * 2)
    for position in range(64, 64 * 300, 64):
        data.batch(order.indices(position, 64))
    # 300 MB were read; the ends of all documents are 80 MB, mapped.
    assert (memory() - before) / MIB < 150
    assert inputs.shape == (64, 512)
    # A document has 999 targets, 512 of them in its first row.
    full = [512 if packed or index % 2 == 0 else 487 for index in order.indices(0, 64)]
    assert (targets != -100).sum(1).tolist() == full
