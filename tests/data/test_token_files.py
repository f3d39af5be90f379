"""Token files: samples have every token once as a target, and a damaged file is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from texts import config_of, made_texts, quiet

from mixer.common.errors import UserError
from mixer.data.prepare import prepare
from mixer.data.prepared import Manifest, TokenFile
from mixer.data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare(config_of(folder, made_texts(60)), quiet)
    return folder / "prepared"


@pytest.fixture
def damaged(prepared, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def test_packed_samples_make_every_token_but_the_first_a_target_once(prepared):
    file = TokenFile(prepared, "train", 32)
    inputs, targets = file.batch(np.arange(len(file)))
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (
        len(file),
        32,
    )
    tokens = torch.from_numpy(np.fromfile(prepared / "train.bin", "<u2").astype(np.int64))
    assert torch.equal(inputs.flatten(), tokens[: len(file) * 32])
    assert torch.equal(targets.flatten(), tokens[1 : len(file) * 32 + 1])
    assert len(tokens) - 1 - len(file) * 32 < 32
    assert torch.equal(file.batch([3, 1])[0], inputs[[3, 1]])


def test_exactly_one_sample_fits_in_context_plus_one_tokens(prepared):
    tokens = Manifest.load(prepared).splits["validation"].tokens
    assert len(TokenFile(prepared, "validation", tokens - 1)) == 1
    with pytest.raises(
        UserError,
        match=f"has {tokens} tokens, and a context of {tokens} needs at least {tokens + 1}",
    ):
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


def test_damaged_files_are_refused_on_opening(damaged):
    def refused(name, content, match="is not what preparing wrote .*; put that back, or delete"):
        file = damaged / name
        good = file.read_bytes() if file.exists() else None
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(UserError, match=f"{name} {match}"):
            TokenFile(damaged, "train", 8)
        file.unlink(missing_ok=True) if good is None else file.write_bytes(good)

    manifest = (damaged / "manifest.json").read_bytes()
    changed = json.loads(manifest)
    changed["splits"]["train"]["words"] = 300
    wrong = "is not what preparing wrote .*: copy it again, or delete"
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
    with pytest.raises(UserError, match="manifest.json cannot be read"):
        TokenFile(damaged, "train", 8)
