"""The token files depend on the text and the settings alone: not on the version, on the number of
workers, on how the text is batched, or on what was killed.
"""

import bz2
import dataclasses
import gzip
import hashlib
import json
import lzma
import multiprocessing
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow
import pytest
from texts import HARD, documents_of, made_texts, quiet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mixer.common.errors import UserError
from mixer.data import prepare as preparation
from mixer.data.config import DataConfig
from mixer.data.prepare import prepare, results
from mixer.data.prepared import TokenFile

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
        texts[number] = [text, f"{text}\n{HARD}" * 3, f"{number} 日本語の文 and русский", " \n"][
            number % 4
        ]
    rows = [json.dumps({"text": text, "n": [None, 3][n > 9]}) for n, text in enumerate(texts)]
    rows[50] = "{}"
    rows[51] = '{"other": 1}'
    zstd = pyarrow.Codec("zstd")
    compressions = {
        "a.jsonl": bytes,
        "b.jsonl.gz": gzip.compress,
        "c/d.jsonl.bz2": bz2.compress,
        "c/e.ndjson.xz": lzma.compress,
        "c/f.jsonl.zst": lambda data: zstd.compress(data, asbytes=True),
    }
    for number, (name, compress) in enumerate(compressions.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
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
    places = {"hub": "hub", "jsonl": "hub", "parquet": "rows.parquet", "saved": "[saved]"}
    found = []
    for name, place in places.items():
        source = name if name != "saved" else "hub"
        config = DataConfig(source=source, path=str(tmp_path / place), tokenizer=tokenizer)
        prepare(dataclasses.replace(config, directory=str(tmp_path / f"d-{name}")), quiet)
        found.append(written(tmp_path / f"d-{name}")[:4])
        assert documents_of(config) == rows["text"][:-1]
    assert all(files == found[0] for files in found)


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
        list(results(lambda job: os.kill(os.getpid(), signal.SIGKILL), range(5), 2))
    assert not multiprocessing.active_children()
