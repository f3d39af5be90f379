"""Token files: samples have every token once as a target, their order is another permutation each
epoch, damage is refused, and ten billion tokens take little time and memory.
"""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from texts import config_of, made_texts, quiet

from mixer.common.errors import UserError
from mixer.common.files import note_of
from mixer.data.config import Manifest, fingerprint
from mixer.data.prepare import prepare
from mixer.data.samples import SampleOrder, TokenFile
from mixer.data.tokenizer import load_tokenizer, train_tokenizer
from mixer.objectives.retrieval import PairFile

TOKENS = 10_000_000_000  # of a sparse file, which takes no space


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare(config_of(folder, made_texts(60)), quiet)
    return folder / "prepared"


def test_packed_samples_make_every_token_but_the_first_a_target_once(prepared):
    file = TokenFile(prepared, "train", 32)
    inputs, targets = file.batch(np.arange(len(file)))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (len(file), 32)
    tokens = torch.from_numpy(np.fromfile(prepared / "train.bin", "<u2").astype(np.int64))
    assert torch.equal(inputs.flatten(), tokens[: len(file) * 32])
    assert torch.equal(targets.flatten(), tokens[1 : len(file) * 32 + 1])
    assert len(tokens) - 1 - len(file) * 32 < 32
    assert torch.equal(file.batch([3, 1])[0], inputs[[3, 1]])


def test_exactly_one_sample_fits_in_context_plus_one_tokens(prepared):
    tokens = Manifest.load(prepared).splits["validation"].tokens
    assert len(TokenFile(prepared, "validation", tokens - 1)) == 1
    with pytest.raises(UserError, match=f"has {tokens} tokens.* needs at least {tokens + 1}"):
        TokenFile(prepared, "validation", tokens)


@pytest.mark.parametrize("context", [7, 64, 4096])
def test_unpacked_rows_hold_one_document_and_lose_no_token(tmp_path, context):
    config = config_of(tmp_path, made_texts(30), packed=False)
    manifest = prepare(config, quiet)
    file = TokenFile(config.directory, "train", context)
    inputs, targets = file.batch(range(len(file)))
    tokens = np.fromfile(tmp_path / "prepared/train.bin", "<u2").astype(np.int64)
    starts = np.concatenate([[0], np.fromfile(tmp_path / "prepared/train.docs.bin", "<i8")[:-1]])
    assert torch.equal(targets[targets != -100], torch.from_numpy(np.delete(tokens, starts)))
    assert (inputs[targets == -100] == manifest.eos_token_id).all()
    # EOS ends a document, nothing follows it in a row
    assert (inputs[targets != -100] != manifest.eos_token_id).all()
    if context == 4096:
        assert len(file) == manifest.splits["train"].documents


@pytest.mark.parametrize("context", [7, 64, 4096])
def test_rows_that_are_cut_hold_the_beginning_of_a_document_without_its_end(tmp_path, context):
    prepare(config_of(tmp_path, [*made_texts(30), "a"], packed=False, cut=True), quiet)
    directory = tmp_path / "prepared"
    rows = []
    for split in ("train", "validation"):
        file = TokenFile(directory, split, context)
        inputs, targets = file.batch(range(len(file)))
        for row, scored in zip(inputs.tolist(), targets.tolist(), strict=True):
            rows.append([row[0], *(token for token in scored if token != -100)])
            assert row == rows[-1] + [0] * (context - len(rows[-1]))  # one target less than tokens
    encode = load_tokenizer(directory).encode
    wanted = [encode(text)[:context] for text in made_texts(30)]
    assert sorted(rows) == sorted(wanted)  # "a" is too short to be scored


def test_damaged_files_are_refused_on_opening(prepared, tmp_path):
    damaged = Path(shutil.copytree(prepared, tmp_path / "copy"))

    def refused(name, content, match="is not what preparation wrote .*; restore it, or delete"):
        file = damaged / name
        good = file.read_bytes() if file.exists() else None
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(UserError, match=f"{name} {match}"):
            TokenFile(damaged, "train", 8)
        file.unlink(missing_ok=True) if good is None else file.write_bytes(good)

    manifest = (damaged / "manifest.json").read_bytes()
    changed = json.loads(manifest)
    changed["splits"]["train"]["words"] = 300
    wrong = "is not what preparation wrote .*: copy it again, or delete"
    refused("manifest.json", json.dumps(changed).encode(), wrong)
    refused("manifest.json", manifest[:-20], "is damaged.*: copy it again, or delete")
    other = train_tokenizer(made_texts(50, seed=5), 300).backend_tokenizer.to_str()
    refused("tokenizer/tokenizer.json", other.encode())
    config = (damaged / "tokenizer/tokenizer_config.json").read_bytes()
    for content in (config.replace(b"<|endoftext|>", b"a"), config[: len(config) // 2], None):
        refused("tokenizer/tokenizer_config.json", content)
    refused("tokenizer/special_tokens_map.json", b'{"eos_token": "a"}')  # a new file
    for name in ("train.bin", "train.docs.bin"):
        content = (damaged / name).read_bytes()
        for changed in (content[:-1] + bytes([content[-1] ^ 1]), content[:100], None):
            refused(name, changed)
    TokenFile(damaged, "train", 8)
    (damaged / "manifest.json").unlink()
    with pytest.raises(UserError, match="has no manifest.json: give a dir"):
        TokenFile(damaged, "train", 8)


@pytest.mark.parametrize("name", ["train.bin", "train.docs.bin"])
def test_a_file_that_is_cut_while_it_is_read_is_named(prepared, tmp_path, name):
    """As where the data is copied anew meanwhile."""
    shutil.copytree(prepared, tmp_path / "cut")
    kind = TokenFile if name == "train.bin" else PairFile
    file = kind(tmp_path / "cut", "train", 8)
    file.batch([len(file) - 1])
    os.truncate(tmp_path / "cut" / name, 12)
    with pytest.raises(UserError, match=f"cut/{name} can no longer be read .it is shorter"):
        file.batch([len(file) - 1])


# --- the order ---------------------------------------------------------------


def test_the_order_is_the_same_everywhere_and_for_ever():
    """Frozen: a change here would change what every resumed run trains on."""
    found = SampleOrder(100, seed=0).indices(0, 10).tolist()
    assert found == [44, 99, 19, 14, 21, 88, 93, 59, 55, 43]
    large = SampleOrder(10**10 // 512, seed=3).indices(10**9, 4).tolist()
    assert large == [7707422, 7980967, 2699730, 15822793]


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000, 4095, 4096, 4097])
def test_an_epoch_has_each_sample_once_whatever_their_number(samples):
    for epoch in range(3):
        found = SampleOrder(samples, seed=1).indices(epoch * samples, samples)
        assert sorted(found) == list(range(samples))


def test_the_position_is_all_that_a_resume_needs():
    whole = SampleOrder(37, seed=0).indices(0, 200)
    assert whole.dtype == np.int64
    for step in (1, 5, 64):  # whatever the batch size, and wherever it starts
        starts = range(0, 200, step)
        parts = [SampleOrder(37, 0).indices(start, min(step, 200 - start)) for start in starts]
        assert np.array_equal(np.concatenate(parts), whole)
    assert len(SampleOrder(37, 0).indices(5, 0)) == 0


# --- ten billion tokens ------------------------------------------------------


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
