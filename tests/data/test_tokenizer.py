"""The tokenizer: every text comes back, and training it is deterministic."""

import random
import time

import numpy as np
import pytest
from texts import HARD, config_of, corpus, decoded_documents, made_texts, quiet

from mixer.common.errors import UserError
from mixer.data.prepare import prepare
from mixer.data.tokenizer import PIECE, load_tokenizer, pieces, raw_encoder, train_tokenizer


def test_trained_tokenizer_is_exactly_reversible_and_deterministic():
    texts = made_texts(200)
    tokenizer = train_tokenizer(texts, 500)
    assert len(tokenizer) == 500
    assert (
        tokenizer.backend_tokenizer.to_str()
        == train_tokenizer(texts, 500).backend_tokenizer.to_str()
    )
    generator = random.Random(1)
    everything = [*range(0xD800), *range(0xE000, 0x110000)]  # all of Unicode but the surrogates
    noise = "".join(map(chr, generator.choices(everything, k=2000)))
    for text, ids in zip(
        [HARD, noise, " ", "a"], raw_encoder(tokenizer)([HARD, noise, " ", "a"]), strict=True
    ):
        assert tokenizer.decode(ids) == text


def test_text_that_spells_the_separator_stays_text(tmp_path):
    texts = ["<|endoftext|>" * 50 + f" {number} <|endoftext|>" for number in range(20)]
    manifest = prepare(config_of(tmp_path, texts), quiet)
    for split in ("train", "validation"):
        tokens = np.fromfile(tmp_path / "prepared" / f"{split}.bin", manifest.dtype)
        assert (tokens == manifest.eos_token_id).sum() == manifest.splits[split].documents
    again = decoded_documents(tmp_path / "prepared", "train") + decoded_documents(
        tmp_path / "prepared", "validation"
    )
    assert sorted(again) == sorted(texts)


def test_existing_tokenizer_is_used_from_a_directory(tmp_path):
    train_tokenizer(made_texts(100), 350).save_pretrained(str(tmp_path / "tok"))
    manifest = prepare(
        config_of(tmp_path, made_texts(30, seed=1), tokenizer=str(tmp_path / "tok")), quiet
    )
    assert (manifest.vocab_size, manifest.tokenizer_bytes) == (350, 0)
    assert (tmp_path / "prepared/tokenizer/tokenizer.json").read_bytes() == (
        tmp_path / "tok/tokenizer.json"
    ).read_bytes()
    with pytest.raises(
        UserError, match="cannot load tokenizer.*give a directory with a tokenizer.json or the name"
    ):
        prepare(
            config_of(tmp_path / "other", ["a b", "c"], tokenizer=str(tmp_path / "nowhere/at/all")),
            quiet,
        )


def test_a_tokenizer_that_would_cut_texts_does_not_cut_documents(tmp_path):
    tokenizer = train_tokenizer(made_texts(100), 350)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.save_pretrained(str(tmp_path / "tok"))
    texts = made_texts(20, seed=1)
    prepare(config_of(tmp_path, texts, tokenizer=str(tmp_path / "tok")), quiet)
    found = [decoded_documents(tmp_path / "prepared", side) for side in ("train", "validation")]
    assert sorted(sum(found, [])) == sorted(texts)


def test_the_tokenizer_is_trained_without_the_validation_text(tmp_path):
    """Otherwise a word of the validation text could have a token of its own."""
    validation = corpus(tmp_path / "validation", ["zyzzyva " * 500] * 3)
    changes = {"validation_path": str(validation), "validation_fraction": 0.01}
    prepare(config_of(tmp_path, made_texts(30), **changes), quiet)
    vocabulary = load_tokenizer(tmp_path / "prepared").get_vocab()
    assert not any("zyz" in token for token in vocabulary) and len(vocabulary) == 300


def test_a_long_run_without_a_break_does_not_stall_the_training():
    began = time.monotonic()
    train_tokenizer(["".join(random.Random(0).choices("abcd", k=PIECE))], 300)
    assert time.monotonic() - began < 20  # quadratic time would be many minutes


def test_a_huge_document_is_cut_into_pieces_and_comes_back(tmp_path):
    huge = ("x" * 99 + "\n") * (PIECE // 50) + "y" * (PIECE + 5)
    assert "".join(pieces(huge)) == huge and max(map(len, pieces(huge))) <= PIECE
    manifest = prepare(config_of(tmp_path, [huge, "small"]), quiet)
    assert manifest.splits["train"].documents == 1
    assert decoded_documents(tmp_path / "prepared", "train") == [huge]
