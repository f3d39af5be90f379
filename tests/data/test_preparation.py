"""Preparation: all documents arrive, and whatever fails or is killed leaves nothing that passes for
data. Real processes, real signals, real files.
"""

import dataclasses
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from runs import file_limit
from texts import HARD, config_of, decoded_documents, made_texts, quiet

from mixer.common.errors import UserError
from mixer.data.prepare import prepare
from mixer.data.prepared import Manifest
from mixer.data.tokenizer import train_tokenizer


def test_every_document_comes_back_and_the_counts_are_true(tmp_path):
    texts = [*made_texts(60), HARD]
    manifest = prepare(config_of(tmp_path, texts), quiet)
    found = {
        split: decoded_documents(tmp_path / "prepared", split) for split in ("train", "validation")
    }
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    for split, back in found.items():
        counts = manifest.splits[split]
        tokens = np.fromfile(tmp_path / "prepared" / f"{split}.bin", "<u2")
        ends = np.fromfile(tmp_path / "prepared" / f"{split}.docs.bin", "<u8")
        assert counts.documents == len(back) == len(ends)
        assert counts.bytes == sum(len(text.encode()) for text in back)
        assert counts.words == sum(len(text.split()) for text in back)
        assert counts.tokens == len(tokens)
        assert ends.tolist() == (np.flatnonzero(tokens == manifest.eos_token_id) + 1).tolist()


def test_a_vocabulary_beyond_16_bits_is_written_as_uint32(tmp_path):
    tokenizer = train_tokenizer(made_texts(20), 300)
    tokenizer.save_pretrained(str(tmp_path / "big"))
    file = tmp_path / "big/tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"extra{number}": len(tokenizer) + number for number in range(66_000)}
    vocabulary["z"], vocabulary["extra65999"] = vocabulary["extra65999"], vocabulary["z"]
    file.write_text(json.dumps(content))
    config = config_of(tmp_path, ["a z b", "c z"], tokenizer=str(tmp_path / "big"))
    manifest = prepare(config, quiet)
    assert manifest.dtype == "uint32" and manifest.vocab_size > 65_536
    assert decoded_documents(config.directory, "train") == ["a z b"]


def test_the_same_settings_give_the_same_files_and_are_skipped(tmp_path):
    config, lines = config_of(tmp_path, made_texts(40)), []
    first = prepare(config, lines.append)
    assert "MB/s" in lines[-1] and "40 documents" in lines[-1]
    before = (tmp_path / "prepared/manifest.json").stat().st_mtime_ns
    assert prepare(dataclasses.replace(config, workers=1), lines.append) == first
    assert first == Manifest.load(config.directory)
    assert len(lines) == 2 and (tmp_path / "prepared/manifest.json").stat().st_mtime_ns == before
    other = prepare(dataclasses.replace(config, directory=str(tmp_path / "again")), quiet)
    assert other.fingerprint == first.fingerprint


def test_other_settings_and_foreign_files_are_never_overwritten(tmp_path):
    config = config_of(tmp_path, made_texts(20))
    prepare(config, quiet)
    problem = r"(?s)data.packed: prepared with True, now False.*data.vocab_size: .*300, now 310"
    with pytest.raises(UserError, match=problem):
        prepare(dataclasses.replace(config, vocab_size=310, packed=False), quiet)
    assert Manifest.load(config.directory).vocab_size == 300
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files.*choose another"):
        prepare(dataclasses.replace(config, directory=str(foreign)), quiet)
    assert [file.name for file in foreign.iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    prepare(dataclasses.replace(config, directory=str(tmp_path / "empty")), quiet)


def _prepare_in_process(config, lines):
    with open(lines, "a") as file:
        prepare(config, lambda line: (file.write(line + "\n"), file.flush()))


def test_of_processes_that_prepare_at_once_one_does_and_the_others_say_that_they_wait(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # they are forks
    train_tokenizer(made_texts(20), 300).save_pretrained(str(tmp_path / "tok"))
    config = config_of(tmp_path, made_texts(1500), tokenizer=str(tmp_path / "tok"))
    processes = multiprocessing.get_context("fork")
    running = [
        processes.Process(target=_prepare_in_process, args=(config, tmp_path / "lines"))
        for _ in range(3)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert (tmp_path / "lines").read_text().count("tokenised: 1,500 documents") == 1
    assert "waiting for another process, which writes" in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"lines", "prepared", "texts", "tok"}


def test_a_disk_that_fills_anywhere_is_one_error_and_with_space_the_same_data_is_prepared(tmp_path):
    whole = config_of(tmp_path, made_texts(40))
    prepare(whole, quiet)
    written = [file for file in (tmp_path / "prepared").rglob("*") if file.is_file()]
    for size in sorted({file.stat().st_size for file in written}):
        config = dataclasses.replace(whole, directory=str(tmp_path / str(size)))
        with file_limit(size - 1), pytest.raises(UserError, match="File too large.* space"):
            prepare(config, quiet)
        assert not Path(config.directory).exists()
        prepare(config, quiet)
        for file in written:
            made = Path(config.directory) / file.relative_to(tmp_path / "prepared")
            assert made.read_bytes() == file.read_bytes()
