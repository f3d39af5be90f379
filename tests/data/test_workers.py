"""Preparation by worker processes: the same bytes for every number of them, whatever is killed."""

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import sysconfig
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from texts import documents_of, quiet

from mixer.common.errors import UserError
from mixer.data import prepare as preparation
from mixer.data import sources, tokenise_all
from mixer.data.config import DataConfig
from mixer.data.prepare import prepare
from mixer.data.tokenizer import KEPT_BYTES, raw_encoder, token_encoder, train_tokenizer
from mixer.data.workers import results

KILLS = max(2, int(os.environ.get("MIXER_SOAK_KILLS", "0")))
FILES = ("train.bin", "train.docs.bin", "validation.bin", "validation.docs.bin", "manifest.json")
HARD = (
    "tabs\t and  spaces \r\n\nnaïve 日本語 🙂 don't 'tis , . ! <|endoftext|> \x00\ufeff \x1c end \n"
)


def made_texts(count: int, seed: int = 0) -> list[str]:
    """Documents of several lines; some are white space alone, and some lines are hard."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefghijé", k=5)) for _ in range(300)]
    texts = []
    for number in range(count):
        lines = [" ".join(generator.choices(words, k=12)) for _ in range(generator.randint(1, 9))]
        texts.append("\n".join([f"{number}:", *lines, HARD]) if number % 7 else " \n")
    return texts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(made_texts(50), 400).save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(sources, "SHARD_BYTES", 3000)


def workers_left() -> list[psutil.Process]:
    return [
        process for process in psutil.Process().children() if "serve(" in str(process.cmdline())
    ]


def written(directory) -> list[bytes]:
    """The content of prepared data, without the paths that its settings name."""
    return [(Path(directory) / name).read_bytes() for name in FILES]


def save(folder: Path, source: str, texts: list[str]) -> str:
    """The texts as a source of this kind, in several files; its path."""
    from datasets import Dataset

    folder.mkdir()
    half = len(texts) // 2
    if source == "text":
        for number, text in enumerate(texts):
            (folder / f"{number:04d}.txt").write_bytes(text.encode())
        return str(folder)
    for part, rows in enumerate((texts[:half], texts[half:])):
        table = Dataset.from_dict({"text": rows, "number": list(range(len(rows)))})
        if source == "parquet":
            table.to_parquet(folder / f"{part}.parquet", batch_size=7)
        elif source == "gzip":
            table.to_json(folder / f"{part}.jsonl.gz", compression="gzip")
        else:
            table.to_json(folder / f"train-{part}.jsonl")
    return str(folder)


@pytest.mark.parametrize(
    "source",
    ["text", "jsonl", "parquet", "hub", "builtin", pytest.param("gzip", marks=pytest.mark.slow)],
)
def test_every_number_of_workers_writes_the_same_bytes(tmp_path, tokenizer, monkeypatch, source):
    texts = made_texts(60)
    settings = {"tokenizer": tokenizer, "validation_fraction": 0.2}
    if source == "builtin":
        texts = [*texts, *texts[:5]]
        for number, text in enumerate(texts):
            (tmp_path / f"{number:04d}.py").write_bytes(text.encode())
        paths = dict.fromkeys(("stdlib", "purelib", "platlib"), str(tmp_path))
        monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    else:
        path = save(tmp_path / "corpus", source, texts)
        settings |= {"source": "jsonl" if source == "gzip" else source, "path": path}
    found = []
    # datasets, which reads the last two, takes each worker seconds to import
    for workers in (1, 2, 3) if source not in ("hub", "gzip") else (1, 2):
        directory = str(tmp_path / f"prepared-{workers}")
        config = DataConfig(**settings, directory=directory, workers=workers)
        manifest = prepare(config, quiet)
        found.append(written(directory))
        assert documents_of(config) == [text for text in texts if not text.isspace()]
    assert all(files == found[0] for files in found)
    assert manifest.splits["validation"].documents > 1
    monkeypatch.setattr(sources, "SHARD_BYTES", 10**9)  # nor does the cut into shards matter
    whole = DataConfig(**settings, directory=str(tmp_path / "whole"), workers=1)
    prepare(whole, quiet)
    assert written(whole.directory) == found[0]


def test_a_validation_text_and_a_limit_of_documents_are_cut_alike(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenise_all, "DOCUMENTS_A_WORKER", 1)
    texts = made_texts(60)
    paths = {
        "path": save(tmp_path / "corpus", "jsonl", texts),
        "validation_path": save(tmp_path / "held out", "jsonl", made_texts(20, seed=1)),
    }
    shared = DataConfig(source="jsonl", tokenizer=tokenizer, path=paths["path"])
    for name, changes in {
        "held-out": paths,
        "limit": {"max_documents": 23},
        "both": {**paths, "max_documents": 23},
    }.items():
        found = []
        for workers in (1, 3):
            directory = str(tmp_path / f"{name}-{workers}")
            changes |= {"workers": workers, "directory": directory}
            splits = prepare(dataclasses.replace(shared, **changes), quiet).splits
            found.append(written(directory))
        assert found[0] == found[1]
        counts = [split.documents for split in splits.values()]
        real = {"held-out": [51, 17], "both": [23, 17]}
        assert counts == real[name] if name in real else sum(counts) == 23


def test_rows_without_the_field_are_no_error_wherever_the_source_is_cut(tmp_path, monkeypatch):
    file, wrong = tmp_path / "rows.jsonl", tmp_path / "wrong.jsonl"
    rows = [{"text": f"document {n}"} if n < 36 else {"title": "of no text"} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrong.write_text("".join(json.dumps(row) + "\n" for row in rows[36:]))
    monkeypatch.setattr(sources, "SHARD_BYTES", 100)
    assert documents_of(DataConfig(source="jsonl", path=str(file))) == [
        f"document {n}" for n in range(36)
    ]
    with pytest.raises(UserError, match="line 1 of .*wrong.jsonl has no field 'text'"):
        documents_of(DataConfig(source="jsonl", path=str(wrong)))


def test_tokens_are_those_of_the_tokenizer_itself(tokenizer, monkeypatch):
    """The words kept never change a token: white space, contractions and scripts of all kinds."""
    from mixer.data import tokenizer as module

    monkeypatch.setattr(module, "KEPT_BYTES", 100_000)  # they are dropped and made again
    assert KEPT_BYTES > 100_000
    trained = module.existing_tokenizer(tokenizer)
    encode = token_encoder(trained.backend_tokenizer.to_str(), np.dtype("<u2"))
    generator = random.Random(0)
    edges = [
        *" \n\t\r\x1c\x1d\x1f\x85\xa0\u2028\u3000'\"-_.,09aZsté²Ⅷ日🙂\u0301\u200b",
        "'ll",
        "  ",
    ]
    texts = ["".join(generator.choices(edges, k=2000)) for _ in range(50)]
    anything = [*range(0xD800), *range(0xE000, 0x30000)]
    texts += [
        "".join(chr(generator.choice(anything)) + generator.choice(edges) for _ in range(2000))
        for _ in range(20)
    ]
    texts += [HARD, "", " ", "a", Path(__file__).read_text()]
    for text, ids in zip(texts, raw_encoder(trained)(texts), strict=True):
        assert np.frombuffer(encode(text), "<u2").tolist() == ids


def test_an_error_in_a_worker_is_the_error_of_the_preparation(tmp_path, tokenizer):
    path = save(tmp_path / "corpus", "jsonl", made_texts(60))
    with open(tmp_path / "corpus" / "train-1.jsonl", "a") as file:
        file.write('{"text": 3}\n')
    config = DataConfig(
        source="jsonl", path=path, tokenizer=tokenizer, directory=str(tmp_path / "prepared")
    )
    place = r"'text' of line 31 of .*train-1.jsonl holds int, not text"
    for workers in (1, 2):
        with pytest.raises(UserError, match=place):
            prepare(dataclasses.replace(config, workers=workers), quiet)
        assert not Path(config.directory).exists() and not workers_left()


def test_a_full_disk_in_a_worker_is_a_readable_error(tmp_path, tokenizer, monkeypatch):
    path = save(tmp_path / "corpus", "text", made_texts(60))
    monkeypatch.setattr(preparation, "TokeniseShard", FullDisk)
    config = DataConfig(source="text", path=path, tokenizer=tokenizer, workers=1)
    with pytest.raises(UserError, match="No space left on device.*Check that there is space"):
        prepare(dataclasses.replace(config, directory=str(tmp_path / "prepared")), quiet)
    assert not (tmp_path / "prepared").exists()


class FullDisk(preparation.TokeniseShard):
    def __call__(self, job, send_update):
        raise OSError(28, "No space left on device")


def test_a_worker_that_is_killed_is_named_and_the_others_end():
    with pytest.raises(UserError, match="ended by signal 9 before it was done.*data.workers"):
        list(results(Kill(), range(3), 2, quiet))
    assert not workers_left()


class Kill:
    """A task that kills its process. Workers do not know this module: it is pickled as a call."""

    def __reduce__(self):
        return eval, ("lambda job, update: __import__('os').kill(__import__('os').getpid(), 9)",)


@pytest.mark.parametrize("workers", [1, 3])
def test_killed_at_random_it_goes_on_from_the_finished_shards(
    tmp_path, tokenizer, monkeypatch, workers
):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the killed processes are forks
    monkeypatch.setattr(sources, "SHARD_BYTES", 20_000)
    path = save(tmp_path / "corpus", "jsonl", made_texts(2000))
    config = DataConfig(
        source="jsonl",
        path=path,
        tokenizer=tokenizer,
        validation_fraction=0.1,
        workers=workers,
        directory=str(tmp_path / "killed"),
    )
    undisturbed = dataclasses.replace(config, directory=str(tmp_path / "undisturbed"))
    began = time.monotonic()
    prepare(undisturbed, quiet)
    whole = time.monotonic() - began
    generator, at_work, before = random.Random(workers), 0, 0
    for _ in range(KILLS):
        _start_and_kill(config, generator.uniform(0.2, 0.9) * whole)
        if Path(config.directory).exists():
            assert written(config.directory) == written(undisturbed.directory)
            shutil.rmtree(config.directory)
            before = 0
            continue
        if list(tmp_path.glob("killed.partial-*/manifest.json")):
            before = 0  # all shards were done, and are put away
            continue
        at_work += 1
        done, half_done = _progress(tmp_path)
        assert done >= before and half_done <= workers  # nothing that was finished is lost
        before = done
    assert at_work or KILLS < 10  # a few kills may all come late
    lines = []
    prepare(config, lines.append)
    assert not before or "going on from" in lines[0]
    assert written(config.directory) == written(undisturbed.directory)
    assert not list(tmp_path.glob("killed.partial-*"))


def test_it_goes_on_with_the_tokenizer_that_it_began_with(tmp_path, tokenizer, monkeypatch):
    """Also where another one stands in its place by now: tokens of both would be no text."""
    folder = shutil.copytree(tokenizer, tmp_path / "tokenizer")
    path = save(tmp_path / "corpus", "jsonl", made_texts(60))
    config = DataConfig(source="jsonl", path=path, tokenizer=str(folder), workers=1)
    config.directory = str(tmp_path / "undisturbed")
    prepare(config, quiet)
    config.directory = str(tmp_path / "prepared")
    appends = iter([tokenise_all.append_shard] * 3)
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(tokenise_all, "append_shard", lambda *parts: next(appends)(*parts))
        prepare(config, quiet)
    shutil.rmtree(folder)
    train_tokenizer(made_texts(50, seed=1), 390).save_pretrained(str(folder))
    lines = []
    prepare(config, lines.append)
    assert "going on from 3 of" in lines[0]
    assert written(config.directory) == written(tmp_path / "undisturbed")


def _start_and_kill(config: DataConfig, seconds: float) -> None:
    process = multiprocessing.get_context("fork").Process(target=prepare, args=(config, quiet))
    process.start()
    process.join(seconds)
    children = psutil.Process(process.pid).children() if process.is_alive() else []
    process.kill()
    process.join()
    assert not psutil.wait_procs(children, timeout=10)[1]  # workers end with their parent


def _progress(folder: Path) -> tuple[int, int]:
    """How many shards are finished, and how many are half done."""
    files = list(folder.glob("killed.partial-*/shards/progress.json"))
    if not files:
        return 0, 0
    appended = json.loads(files[0].read_text())["shards"]
    names = [shard.name for shard in files[0].parent.glob("0*")]
    whole = [name for name in names if name.isdigit() and int(name) >= appended]
    return appended + len(whole), sum(name.endswith(".partial") for name in names)
