"""Preparation: all documents arrive, as the same bytes whatever the version and the workers; what
fails or is killed leaves nothing that passes for data. Real processes, signals and files.
"""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from runs import file_limit
from texts import COMPRESSIONS, HARD, config_of, decoded_documents, documents_of, made_texts, quiet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mixer.common.errors import UserError
from mixer.data import prepare as preparation
from mixer.data.config import DataConfig, Manifest
from mixer.data.prepare import parallel_map, prepare
from mixer.data.samples import TokenFile
from mixer.data.tokenizer import train_tokenizer

KILLS = max(1, int(os.environ.get("MIXER_SOAK_KILLS", "0")))
FILES = ("train.bin", "train.docs.bin", "validation.bin", "validation.docs.bin", "manifest.json")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 3000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """Byte-level, with few merges: no version of a library has a part in it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("o", "c"), ("oc", "u"), ("Ġ", "a")]
    vocabulary = ["<|endoftext|>", *alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    fast.save_pretrained(str(folder))
    return str(folder)


def written(directory: str | Path) -> list[bytes]:
    return [(Path(directory) / name).read_bytes() for name in FILES]


def mixed_corpus(folder: Path) -> Path:
    """Files of all kinds that hold rows of text, in several scripts; some are blank or missing."""
    texts = made_texts(200)
    for number, text in enumerate(texts):
        kinds = text, f"{text}\n{HARD}" * 3, f"{number} 日本語の文 and русский", " \n"
        texts[number] = kinds[number % 4]
    rows = [json.dumps({"text": text, "n": [None, 3][n > 9]}) for n, text in enumerate(texts)]
    rows[50] = "{}"
    rows[51] = '{"other": 1}'
    (folder / "c").mkdir(parents=True)
    names = ("a.jsonl", "b.jsonl.gz", "c/d.jsonl.bz2", "c/e.ndjson.xz", "c/f.jsonl.zst")
    for number, (name, compress) in enumerate(zip(names, COMPRESSIONS.values(), strict=True)):
        part = "\n".join(rows[number * 40 : number * 40 + 40])
        (folder / name).write_bytes(compress(part.encode()))
    (folder / "g.json").write_text(json.dumps([{"text": text} for text in texts[:5]], indent=1))
    (folder / "link").symlink_to(folder / "c")
    return folder


GOLDEN = {
    "fraction": ({"validation_fraction": 0.2}, "f2835b9ad6738c11"),
    "limit": ({"validation_fraction": 0.2, "max_documents": 77}, "1e68a25d4169090a"),
    "own": ({"validation_path": "v.jsonl", "max_documents": 100}, "b14d098a30073080"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_token_files_are_those_of_every_version_and_number_of_workers(
    tmp_path, tokenizer, monkeypatch, name
):
    changes, golden = GOLDEN[name]
    monkeypatch.chdir(tmp_path)  # the manifest holds the path
    mixed_corpus(tmp_path / "corpus")
    Path("v.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in made_texts(20, 1)))
    config = DataConfig(source="jsonl", path="corpus", tokenizer=tokenizer, **changes)
    prepare(dataclasses.replace(config, directory="alone", workers=1), quiet)
    found = written("alone")
    assert hashlib.sha256(b"".join(found[:4])).hexdigest()[:16] == golden
    prepare(dataclasses.replace(config, directory="workers", workers=3), quiet)
    assert written("workers") == found
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 10**9)
    prepare(dataclasses.replace(config, directory="batch", workers=1), quiet)
    assert written("batch") == found


def test_parquet_hub_and_jsonl_give_the_same_tokens(tmp_path, tokenizer):
    from datasets import Dataset

    rows = Dataset.from_dict({"text": [*made_texts(60), HARD, " "], "n": list(range(62))})
    (tmp_path / "hub").mkdir()
    rows.select(range(30)).to_json(tmp_path / "hub/train-0.jsonl")
    rows.select(range(30, 62)).to_json(tmp_path / "hub/train-1.jsonl")
    rows.to_parquet(tmp_path / "rows.parquet", batch_size=7)
    rows.save_to_disk(tmp_path / "[saved]")
    found = []
    for given in ("hub hub", "jsonl hub", "parquet rows.parquet", "hub [saved]"):
        source, place = given.split()
        config = DataConfig(source=source, path=str(tmp_path / place), tokenizer=tokenizer)
        prepare(dataclasses.replace(config, directory=str(tmp_path / given)), quiet)
        found.append(written(tmp_path / given)[:4])
        assert documents_of(config) == rows["text"][:-1]
    assert all(files == found[0] for files in found)


def test_every_document_comes_back_and_the_counts_are_true(tmp_path):
    texts = [*made_texts(60), HARD]
    manifest = prepare(config_of(tmp_path, texts), quiet)
    found = {split: decoded_documents(tmp_path / "prepared", split) for split in manifest.splits}
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


@pytest.mark.parametrize("way", ["path", "documents"])
def test_training_documents_that_are_copies_of_validation_documents_are_counted(tmp_path, way):
    texts, said = made_texts(60), []
    config = config_of(tmp_path, [*texts, *texts[:3]])
    if way == "documents":
        config = dataclasses.replace(config, validation_documents=4)
    else:
        other = config_of(tmp_path / "other", [*texts[:2], *made_texts(3, seed=1)])
        config = dataclasses.replace(config, validation_path=other.path)
    prepare(config, said.append)
    count = {"documents": 3, "path": 4}[way]  # two of them stand in the training text twice
    lines = [line for line in said if "among the validation documents too" in line]
    assert [line.split()[0] for line in lines] == [str(count)]


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


def test_no_part_of_a_long_preparation_is_silent(tmp_path, monkeypatch):
    """Also where all of the text is one document."""
    monkeypatch.setattr("mixer.common.progress.SECONDS", 0.001)
    monkeypatch.setattr(preparation.tokenizing.pieces, "__defaults__", (10_000,))
    lines, config = [], config_of(tmp_path, ["\n".join(made_texts(500))], workers=2)
    prepare(config, lines.append)
    tokenizer = str(tmp_path / "prepared/tokenizer")
    other = dataclasses.replace(config, directory=str(tmp_path / "other"), tokenizer=tokenizer)
    prepare(other, lines.append)
    said = Counter(line.split(":")[0] for line in lines)
    for part in (
        "training the tokenizer",
        "tokenized so far",
        "reading the tokenizer, and a sampl",
    ):
        assert sum(said[each] for each in said if each.startswith(part)) > 1, lines
    assert said["tokenized"] == 2


def test_other_settings_and_foreign_files_are_never_overwritten(tmp_path):
    config = config_of(tmp_path, made_texts(20))
    prepare(config, quiet)
    problem = r"(?s)data.cut: prepared with False, now True.*data.packed: prepared with True, now "
    with pytest.raises(UserError, match=problem + r"False.*data.vocab_size: .*300, now 310"):
        prepare(dataclasses.replace(config, vocab_size=310, packed=False, cut=True), quiet)
    assert Manifest.load(config.directory).vocab_size == 300
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files.*choose another"):
        prepare(dataclasses.replace(config, directory=str(foreign)), quiet)
    assert [file.name for file in foreign.iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    prepare(dataclasses.replace(config, directory=str(tmp_path / "empty")), quiet)


# --- several processes, a full disk -------------------------------------------


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
    given = {"target": _prepare_in_process, "args": (config, tmp_path / "lines")}
    running = [processes.Process(**given) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert (tmp_path / "lines").read_text().count("tokenized: 1,500 documents") == 1
    assert "waiting for another process, which writes" in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"lines", "prepared", "texts", "tok"}


def test_a_disk_that_fills_anywhere_is_one_error_and_with_space_the_same_data_is_prepared(tmp_path):
    whole = config_of(tmp_path, made_texts(40))
    prepare(whole, quiet)
    written = [file for file in (tmp_path / "prepared").rglob("*") if file.is_file()]
    for size in sorted({file.stat().st_size for file in written}):
        config = dataclasses.replace(whole, directory=str(tmp_path / str(size)))
        with file_limit(size - 1), pytest.raises(UserError, match="File too large.* fix the cause"):
            prepare(config, quiet)
        assert not Path(config.directory).exists()
        prepare(config, quiet)
        for file in written:
            made = Path(config.directory) / file.relative_to(tmp_path / "prepared")
            assert made.read_bytes() == file.read_bytes()


# --- what is killed ----------------------------------------------------------


def _start_and_kill(config: DataConfig, size: int) -> None:
    """Kills a preparation when this many bytes of tokens are written."""
    process = multiprocessing.get_context("fork").Process(target=prepare, args=(config, quiet))
    process.start()

    written = 0
    while process.is_alive() and written < size:
        time.sleep(0.001)
        for file in Path(config.directory).parent.glob(".partial-*/train.bin"):
            with suppress(FileNotFoundError):  # the directory has its name by now
                written = file.stat().st_size
    children = psutil.Process(process.pid).children() if process.is_alive() else []
    process.kill()
    process.join()
    assert not psutil.wait_procs(children, timeout=10)[1]  # workers end with their parent


@pytest.mark.parametrize("workers", [1, 3])
def test_a_killed_preparation_leaves_nothing_that_passes_for_data(
    tmp_path, tokenizer, monkeypatch, workers
):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the killed processes are forks
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 20_000)
    rows = (json.dumps({"text": text}) + "\n" for text in made_texts(2000))
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    config = DataConfig(source="jsonl", path=str(tmp_path / "rows.jsonl"), tokenizer=tokenizer)
    config.workers, config.directory = workers, str(tmp_path / "whole")
    prepare(config, quiet)
    found = written(config.directory)
    config.directory = str(tmp_path / "killed")
    for size in [0, *random.Random(workers).choices(range(1, len(found[0])), k=KILLS), 10**9]:
        _start_and_kill(config, size)
        if Path(config.directory).exists():  # the last kill comes too late
            assert TokenFile(config.directory, "train", 8) and size > 0
            if size < 10**9:
                shutil.rmtree(config.directory)
    assert prepare(config, quiet) and written(config.directory) == found
    assert not list(tmp_path.glob(".partial-*"))


def test_a_worker_that_is_killed_is_named_and_the_others_end():
    with pytest.raises(UserError, match="worker process was killed.*data.workers"):
        list(parallel_map(lambda job: os.kill(os.getpid(), signal.SIGKILL), range(5), 2))
    assert not multiprocessing.active_children()
