"""Promises of the data part, each kept on real files, with the real `datasets` library and real
processes.
"""

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import file_limit

from mixer.common.errors import UserError
from mixer.data.config import DataConfig
from mixer.data.corpus import documents, shard_documents, split_shards
from mixer.data.manifest import Manifest, fingerprint
from mixer.data.order import SampleOrder
from mixer.data.prepare import prepare
from mixer.data.token_file import TokenFile
from mixer.data.tokenizer import PIECE, load_tokenizer, pieces, raw_encoder, train_tokenizer

WRITTEN_BEFORE = Path(__file__).parents[1] / "checkpoints" / "written_before"
HARD = "tabs\t and  spaces \r\n\nnaïve 日本語 🙂 don't , . ! <|endoftext|> \x00\ufeff end \n"


def made_texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    words = [
        "".join(generator.choices("abcdefghij é", k=generator.randint(2, 8))) for _ in range(500)
    ]
    return [
        f"document {n}: " + " ".join(generator.choices(words, k=generator.randint(20, 200)))
        for n in range(count)
    ]


def corpus(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:05d}.txt").write_bytes(text.encode())
    return folder


def config_of(tmp_path: Path, texts: list[str] | None = None, **changes) -> DataConfig:
    settings = {
        "source": "text",
        "vocab_size": 300,
        "validation_fraction": 0.1,
        "directory": str(tmp_path / "prepared"),
    }
    if texts is not None:
        settings["path"] = str(corpus(tmp_path / "texts", texts))
    return DataConfig(**(settings | changes))


def quiet(*_):
    pass


def decoded_documents(directory, split: str) -> list[str]:
    """The documents back from the token file alone, cut at EOS."""
    manifest, tokenizer = Manifest.load(directory), load_tokenizer(directory)
    tokens = np.fromfile(Path(directory) / f"{split}.bin", manifest.dtype)
    ends = np.flatnonzero(tokens == manifest.eos_token_id)
    assert ends[-1] == len(tokens) - 1
    starts = [0, *(ends[:-1] + 1)]
    return [
        tokenizer.decode(tokens[start:end].tolist())
        for start, end in zip(starts, ends, strict=True)
    ]


# --- sources -----------------------------------------------------------------


def test_builtin_corpus_is_prepared_from_the_running_python(tmp_path):
    config = DataConfig(directory=str(tmp_path / "b"), max_documents=50, vocab_size=400)
    manifest = prepare(config, quiet)
    assert sum(split.documents for split in manifest.splits.values()) == 50
    everything = set(documents(dataclasses.replace(config, max_documents=0)))
    assert Path(os.__file__).read_text() in everything
    assert Path(pytest.__file__).read_text() not in everything  # of the standard library alone


def test_the_builtin_corpus_takes_in_the_installed_packages_and_drops_copies(tmp_path, monkeypatch):
    folders = {name: tmp_path / name for name in ("stdlib", "purelib")}
    files = {
        "stdlib/os.py": "system",
        "stdlib/site-packages/seen_twice.py": "of another environment",
        "purelib/first/a.py": "first a",
        "purelib/second/vendor/a.py": "first a",
        "purelib/second/latin.py": "caf\xe9".encode("latin1"),
        "purelib/second/data.txt": "no source",
        "purelib/third.py": "third",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    paths = {name: str(folder) for name, folder in folders.items()} | {
        "platlib": str(folders["purelib"])
    }
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    everything = list(documents(DataConfig(subset="packages")))
    assert sorted(everything) == ["first a", "system", "third"]
    assert list(documents(DataConfig(subset="packages", max_documents=2))) == everything[:2]
    assert list(documents(DataConfig())) == ["system"]
    # the order is that of the names below the folder
    shutil.move(folders["purelib"], tmp_path / "elsewhere")
    paths["purelib"] = paths["platlib"] = str(tmp_path / "elsewhere")
    assert list(documents(DataConfig(subset="packages"))) == everything


@pytest.mark.parametrize("form", ["file", "directory", "glob"])
def test_text_is_one_document_a_file(tmp_path, form):
    folder = corpus(tmp_path / "texts", ["first\r\n", "second"])
    (folder / ".hidden").write_text("no")
    (folder / "empty.txt").write_text(" \n")
    path = {"file": folder / "00000.txt", "directory": folder, "glob": folder / "0*.txt"}[form]
    expected = ["first\r\n"] if form == "file" else ["first\r\n", "second"]
    assert list(documents(DataConfig(source="text", path=str(path)))) == expected


def test_jsonl_and_parquet_give_the_same_documents(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"body": ["one", HARD, "three"], "n": [1, 2, 3]})
    rows.to_json(tmp_path / "[odd] name.jsonl")
    rows.to_parquet(tmp_path / "rows.parquet")
    for source in ("jsonl", "parquet"):
        config = DataConfig(source=source, path=str(tmp_path), text_field="body")
        assert list(documents(config)) == ["one", HARD, "three"]


def test_hub_dataset_streams_a_split(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "held out"}\n')
    config = DataConfig(source="hub", path=str(tmp_path))
    assert list(documents(config)) == ["a", "b"]
    assert list(documents(dataclasses.replace(config, split="test"))) == ["held out"]
    assert list(documents(dataclasses.replace(config, max_documents=1))) == ["a"]
    with pytest.raises(UserError, match="Bad split: nope.*data.split"):
        list(documents(dataclasses.replace(config, split="nope")))


def test_source_errors_say_what_to_do(tmp_path):
    def refused(match, **settings):
        with pytest.raises(UserError, match=match):
            list(documents(DataConfig(**settings)))

    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin1"))
    (tmp_path / "blank.txt").write_text("\n")
    (tmp_path / "rows.jsonl").write_text('{"body": "x", "id": 3}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (tmp_path / "none.jsonl").write_text("")
    refused("'csv'; allowed: builtin, text, jsonl, parquet, hub", source="csv")
    refused("data.path is empty", source="text")
    refused("data.path is 'mine', which source 'builtin' does not read", path="mine")
    refused("no file or directory", source="text", path=str(tmp_path / "missing.txt"))
    refused(
        r"latin.txt is not UTF-8: byte 0xe9 at offset 3.*iconv",
        source="text",
        path=str(tmp_path / "latin.txt"),
    )
    refused("corpus is empty", source="text", path=str(tmp_path / "blank.txt"))
    refused("holds no file ending in .parquet", source="parquet", path=str(tmp_path))
    refused(
        "no field 'text'; its fields: body, id", source="jsonl", path=str(tmp_path / "rows.jsonl")
    )
    refused(
        "holds int, not text", source="jsonl", path=str(tmp_path / "rows.jsonl"), text_field="id"
    )
    refused("cannot read jsonl .*broken", source="jsonl", path=str(tmp_path / "broken.jsonl"))
    refused("corpus is empty", source="jsonl", path=str(tmp_path / "none.jsonl"))
    refused("data.subset is 'sample-10BT'; source builtin allows packages", subset="sample-10BT")
    refused("vocab_size = 256; allowed: 257 or more", vocab_size=256)
    for fraction in (0.0, 1.0, float("nan")):
        refused("validation_fraction = .*; allowed: above 0", validation_fraction=fraction)


# --- splits ------------------------------------------------------------------


def test_no_copy_of_a_validation_document_is_trained_on(tmp_path):
    texts = made_texts(300)
    mixed = [texts[0], *texts, *reversed(texts), HARD]
    manifest = prepare(config_of(tmp_path, mixed), quiet)
    train, held_out = (decoded_documents(tmp_path / "prepared", split) for split in manifest.splits)
    assert len(train) + len(held_out) == len(mixed)
    assert not set(train) & set(held_out)
    assert texts[0] in train and texts[1] in held_out  # fixed, so that there is one of each
    assert 0.05 < len(held_out) / len(mixed) < 0.15  # 0.1 is asked


def test_a_document_keeps_its_split_when_the_corpus_grows(tmp_path):
    texts = made_texts(60)
    prepare(config_of(tmp_path / "all", texts), quiet)
    prepare(config_of(tmp_path / "half", texts[:30]), quiet)
    for split in ("train", "validation"):
        of_half = decoded_documents(tmp_path / "half" / "prepared", split)
        of_all = decoded_documents(tmp_path / "all" / "prepared", split)
        assert of_half == of_all[: len(of_half)]


def test_two_documents_are_one_each_and_a_single_one_is_refused(tmp_path):
    config = config_of(tmp_path, made_texts(2), validation_fraction=0.001)
    assert [split.documents for split in prepare(config, quiet).splits.values()] == [1, 1]
    for name, texts in (("single", made_texts(1)), ("copies", made_texts(1) * 3)):
        refused = config_of(tmp_path / name, texts)
        with pytest.raises(UserError, match="single document.*Give at least two"):
            prepare(refused, quiet)
        assert not Path(refused.directory).exists()


def test_a_validation_text_of_its_own_is_all_of_the_validation_split(tmp_path):
    train, held_out = made_texts(20), [*made_texts(3, seed=1), HARD]
    file = corpus(tmp_path / "held out", held_out)
    prepare(config_of(tmp_path, [*train, held_out[0]], validation_fraction=0.5), quiet)
    with_share = Manifest.load(tmp_path / "prepared").fingerprint
    own = dict(validation_path=str(file), validation_fraction=0.01, max_documents=21)
    config = config_of(tmp_path, None, path=str(tmp_path / "texts"), **own)
    config.directory = str(tmp_path / "own")
    manifest = prepare(config, quiet)
    assert manifest.fingerprint != with_share
    for split, texts in (("train", [*train, held_out[0]]), ("validation", held_out)):
        assert decoded_documents(config.directory, split) == texts
        counts = manifest.splits[split]
        assert counts.documents == len(texts)
        assert counts.bytes == sum(len(text.encode()) for text in texts)
    assert manifest.tokenizer_bytes == manifest.splits["train"].bytes
    assert prepare(config, quiet) == manifest
    elsewhere = dataclasses.replace(config, validation_path=str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="data.validation_path: prepared with '.*/held out', now"):
        prepare(elsewhere, quiet)
    one = dataclasses.replace(config, max_documents=1, directory=str(tmp_path / "one"))
    counts = prepare(one, quiet).splits
    assert [split.documents for split in counts.values()] == [1, 4]


def test_a_validation_text_may_be_rows_of_a_file_or_a_split_of_the_hub(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "held out"}\n')
    rows = dict(source="jsonl", path=str(tmp_path / "tr*.jsonl"))
    rows["validation_path"] = str(tmp_path / "test.jsonl")
    hub = dict(source="hub", path=str(tmp_path), validation_split="test")
    for settings in (rows, hub):
        config = DataConfig(**settings, vocab_size=300)
        shards = split_shards(config)
        found = [(split, text) for split, shard in shards for text in shard_documents(shard)]
        assert found == [("train", "a b"), ("train", "c"), ("validation", "held out")]


def test_a_validation_text_that_cannot_be_used_is_refused_before_any_work(tmp_path):
    path = str(corpus(tmp_path / "texts", ["a", "b"]))
    settings = dict(source="text", path=path, directory=str(tmp_path / "prepared"))

    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            prepare(DataConfig(**(settings | changes)), lambda line: pytest.fail(line))
        assert not (tmp_path / "prepared").exists()
        assert not list(tmp_path.glob("prepared.partial-*"))

    refused("correct data.validation_path", validation_path=str(tmp_path / "missing"))
    (tmp_path / "blank.txt").write_text("\n")
    refused("no document with text in .*blank", validation_path=str(tmp_path / "blank.txt"))
    both = dict(validation_path=path, validation_fraction=0.2)
    refused("Leave out data.validation_fraction .* or data.validation_path", **both)
    refused("00001.txt belongs to both", validation_path=f"{path}/00001.txt")
    refused("source 'builtin' cannot read", source="builtin", path="", validation_path=path)
    refused("set data.validation_split instead", source="hub", validation_path="test")
    refused("for files, set data.validation_path", validation_split="test")
    refused("both 'train'", source="hub", validation_split="train")
    (tmp_path / "texts" / "train.jsonl").write_text('{"text": "a"}\n')
    refused("Bad split: nope.*data.validation_split", source="hub", validation_split="nope")


def test_data_prepared_before_there_were_validation_texts_is_used_as_it_is(tmp_path):
    shutil.copytree(WRITTEN_BEFORE / "data", tmp_path / "data")
    before = Manifest.load(tmp_path / "data")
    config = DataConfig(**before.settings, directory=str(tmp_path / "data"))
    assert prepare(config, lambda line: pytest.fail(line)) == before
    with pytest.raises(UserError, match="data.validation_path: prepared with '', now 'other'"):
        changed = dict(validation_path="other", validation_fraction=0.01)
        prepare(dataclasses.replace(config, **changed), quiet)


# --- tokenizer ---------------------------------------------------------------


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


# --- preparation -------------------------------------------------------------


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
        assert (counts.tokens, counts.max_token_id) == (len(tokens), tokens.max())
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
    assert manifest.dtype == "uint32" and manifest.splits["train"].max_token_id > 65_535
    assert decoded_documents(config.directory, "train") == ["a z b"]


def test_the_same_settings_give_the_same_files_and_are_skipped(tmp_path):
    config, lines = config_of(tmp_path, made_texts(40)), []
    first = prepare(config, lines.append)
    assert "MB/s" in lines[-1] and "tokens/s" in lines[-1] and "40 documents" in lines[-1]
    before = (tmp_path / "prepared/manifest.json").stat().st_mtime_ns
    assert (
        prepare(dataclasses.replace(config, workers=1), lines.append)
        == first
        == Manifest.load(config.directory)
    )
    assert len(lines) == 2 and (tmp_path / "prepared/manifest.json").stat().st_mtime_ns == before
    other = prepare(dataclasses.replace(config, directory=str(tmp_path / "again")), quiet)
    assert other.fingerprint == first.fingerprint
    different = prepare(
        dataclasses.replace(config, directory=str(tmp_path / "d"), packed=False), quiet
    )
    assert different.fingerprint != first.fingerprint


def test_other_settings_and_foreign_files_are_never_overwritten(tmp_path):
    config = config_of(tmp_path, made_texts(20))
    prepare(config, quiet)
    with pytest.raises(
        UserError,
        match=r"(?s)data.packed: prepared with True, now False.*data.vocab_size: .*300, now 310",
    ):
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


def test_a_place_that_cannot_be_written_is_a_readable_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="choose another data.directory"):
        prepare(
            config_of(tmp_path, ["a", "b"], directory=str(tmp_path / "file" / "prepared")), quiet
        )


def _prepare_in_process(config, lines):
    with open(lines, "a") as file:
        prepare(config, lambda line: (file.write(line + "\n"), file.flush()))


@pytest.fixture(scope="module")
def processes():
    """Processes that start quickly and have never used the tokenizer's threads: forked from one
    that only imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mixer.data.token_file", __name__])
    return context


def test_processes_that_prepare_at_once_do_the_work_once(tmp_path, processes):
    config = config_of(tmp_path, made_texts(1500))
    running = [
        processes.Process(target=_prepare_in_process, args=(config, tmp_path / "lines"))
        for _ in range(3)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert (tmp_path / "lines").read_text().count("tokenised: 1500 documents") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "lines",
        "prepared",
        "prepared.lock",
        "texts",
    ]


def test_a_disk_that_fills_anywhere_is_one_error_and_with_space_the_same_data_is_prepared(tmp_path):
    whole = config_of(tmp_path, made_texts(40))
    prepare(whole, quiet)
    files = [file for file in (tmp_path / "prepared").rglob("*") if file.is_file()]
    for size in sorted({file.stat().st_size for file in files}):
        config = dataclasses.replace(whole, directory=str(tmp_path / str(size)))
        with file_limit(size - 1), pytest.raises(UserError, match="File too large.* space"):
            prepare(config, quiet)
        assert not Path(config.directory).exists()
        prepare(config, quiet)
        for file in files:
            made = Path(config.directory) / file.relative_to(tmp_path / "prepared")
            assert made.read_bytes() == file.read_bytes()


def test_a_kill_at_any_moment_leaves_nothing_that_passes_for_data(tmp_path, processes):
    config = config_of(tmp_path, made_texts(3000))
    warm = processes.Process(
        target=_prepare_in_process,
        args=(config_of(tmp_path / "w", ["a", "b"]), tmp_path / "w/lines"),
    )
    warm.start()
    warm.join()
    began = time.monotonic()
    prepare(dataclasses.replace(config, directory=str(tmp_path / "whole")), quiet)
    whole, killed_at_work = time.monotonic() - began, 0
    for share in (0.05, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        process = processes.Process(target=_prepare_in_process, args=(config, tmp_path / "lines"))
        process.start()
        process.join(whole * share)
        process.is_alive() and os.kill(process.pid, signal.SIGKILL)
        process.join()
        if not (tmp_path / "prepared").exists():
            killed_at_work += bool(list(tmp_path.glob("prepared.partial-*")))
            continue
        assert TokenFile(config.directory, "train", 8).manifest == Manifest.load(tmp_path / "whole")
        break
    assert killed_at_work >= 2
    assert prepare(config, quiet) == Manifest.load(tmp_path / "whole")
    for file in (
        "train.bin",
        "validation.bin",
        "train.docs.bin",
        "validation.docs.bin",
        "tokenizer/tokenizer.json",
    ):
        assert (tmp_path / "prepared" / file).read_bytes() == (
            tmp_path / "whole" / file
        ).read_bytes()
    assert not list(tmp_path.glob("prepared.partial-*"))


# --- token files -------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare(config_of(folder, made_texts(60)), quiet)
    return folder / "prepared"


@pytest.fixture
def damaged(prepared, tmp_path) -> Path:
    """A copy to damage."""
    import shutil

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
    with pytest.raises(IndexError, match=f"allowed 0..{len(file) - 1}"):
        file.batch([len(file)])


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


def test_damaged_files_are_refused_on_opening(damaged):
    def refused(match, split="train"):
        with pytest.raises(UserError, match=match):
            TokenFile(damaged, split, 8)

    refused("no split 'test'; allowed: train, validation", split="test")
    manifest = json.loads((damaged / "manifest.json").read_text())
    manifest["splits"]["train"]["max_token_id"] = 300
    good = (damaged / "manifest.json").read_text()
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    refused("manifest.json is not what preparing wrote")
    manifest["fingerprint"] = fingerprint(manifest)
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    refused("token id 300, beyond its vocabulary of 300")
    (damaged / "manifest.json").write_text(good[:-20])
    refused("manifest.json is damaged.*prepare again")
    (damaged / "manifest.json").write_text(good.replace('"format": 1', '"format": 99'))
    refused("has format 99")
    (damaged / "manifest.json").write_text(good)
    other = train_tokenizer(made_texts(50, seed=5), 300)
    kept = (damaged / "tokenizer/tokenizer.json").read_bytes()
    other.save_pretrained(str(damaged / "tokenizer"))
    refused("not the tokenizer that made the token files")
    (damaged / "tokenizer/tokenizer.json").write_bytes(kept)
    TokenFile(damaged, "train", 8)
    for name in ("train.bin", "train.docs.bin"):
        content = (damaged / name).read_bytes()
        (damaged / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        refused(rf"{name} is damaged: .*its SHA-256 differs\); copy it again, or delete")
        (damaged / name).write_bytes(content)
    os.truncate(damaged / "train.bin", 100)
    refused("train.bin should have .* bytes and is 100: cut short")
    (damaged / "train.bin").unlink()
    refused("train.bin should have .* is missing")
    (damaged / "manifest.json").unlink()
    refused("no manifest.json")


# --- order -------------------------------------------------------------------


def test_each_epoch_is_another_permutation_and_depends_on_the_seed():
    order = SampleOrder(100, seed=3)
    epochs = [order.indices(epoch * 100, 100) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, SampleOrder(100, seed=4).indices(0, 100)]}) == 4


def test_the_position_is_all_that_a_resume_needs():
    whole = SampleOrder(37, seed=0).indices(0, 200)
    assert whole.dtype == np.int64
    for step in (1, 5, 64):  # whatever the batch size, and wherever it starts
        parts = [
            SampleOrder(37, 0).indices(start, min(step, 200 - start))
            for start in range(0, 200, step)
        ]
        assert np.array_equal(np.concatenate(parts), whole)
    order = SampleOrder(37, 0)
    assert np.array_equal(order.indices(150, 20), whole[150:170])
    assert np.array_equal(order.indices(10, 20), whole[10:30])
    assert len(order.indices(5, 0)) == 0
