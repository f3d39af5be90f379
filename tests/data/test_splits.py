"""Which documents train and which validate: no text is in both, and none changes sides."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from texts import HARD, config_of, corpus, decoded_documents, made_texts, quiet

from mixer.common.errors import UserError
from mixer.data.config import DataConfig
from mixer.data.prepare import Corpus, prepare
from mixer.data.prepared import Manifest

WRITTEN_BEFORE = Path(__file__).parents[1] / "checkpoints" / "written_before"


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
        with pytest.raises(UserError, match="documents for train alone.*Give more documents"):
            prepare(refused, quiet)
        assert not Path(refused.directory).exists()


def test_the_first_documents_are_held_out_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("mixer.data.prepare.BATCH_CHARACTERS", 3000)  # several batches
    texts = [*made_texts(40), made_texts(1)[0], HARD]
    config = config_of(tmp_path, texts, validation_documents=7, workers=2)
    prepare(config, quiet)
    assert decoded_documents(config.directory, "validation") == texts[:7]
    assert decoded_documents(config.directory, "train") == texts[7:]
    changed = dataclasses.replace(config, validation_documents=8)
    with pytest.raises(UserError, match="data.validation_documents: prepared with 7, now 8"):
        prepare(changed, quiet)
    none = dataclasses.replace(config, validation_documents=42, directory=str(tmp_path / "none"))
    with pytest.raises(
        UserError, match="for validation alone.*a smaller data.validation_documents"
    ):
        prepare(none, quiet)


def test_a_validation_text_of_its_own_is_all_of_the_validation_split(tmp_path):
    train, held_out = made_texts(20), [*made_texts(3, seed=1), HARD]
    train.append(held_out[0])  # a copy does not change sides
    own = dict(validation_path=str(corpus(tmp_path / "held out", held_out)), max_documents=21)
    config = config_of(tmp_path, train, **own)
    manifest = prepare(config, quiet)
    for split, texts in (("train", train), ("validation", held_out)):
        assert decoded_documents(config.directory, split) == texts
        assert manifest.splits[split].documents == len(texts)
    elsewhere = dataclasses.replace(config, validation_path=str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="data.validation_path: prepared with '.*/held out', now"):
        prepare(elsewhere, quiet)
    one = dataclasses.replace(config, max_documents=1, directory=str(tmp_path / "one"))
    assert [split.documents for split in prepare(one, quiet).splits.values()] == [1, 4]


def test_a_validation_text_may_be_rows_of_a_file_or_a_split_of_the_hub(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "held out"}\n')
    rows = dict(source="jsonl", path=str(tmp_path / "tr*.jsonl"))
    rows["validation_path"] = str(tmp_path / "test.jsonl")
    hub = dict(source="hub", path=str(tmp_path), validation_split="test")
    for settings in (rows, hub):
        config = DataConfig(**settings, vocab_size=300)
        found = list(Corpus(config).documents(quiet))
        assert found == [("validation", "held out"), ("train", "a b"), ("train", "c")]


def test_a_validation_text_that_cannot_be_used_is_refused_before_any_work(tmp_path):
    path = str(corpus(tmp_path / "texts", ["a", "b"]))
    settings = dict(source="text", path=path, directory=str(tmp_path / "prepared"))

    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            prepare(DataConfig(**(settings | changes)), lambda line: pytest.fail(line))
        assert not (tmp_path / "prepared").exists()
        assert not list(tmp_path.glob("prepared.partial-*"))

    refused("missing' is no file", validation_path=str(tmp_path / "missing"))
    (tmp_path / "blank.txt").write_text("\n")
    refused("no document with text in .*blank", validation_path=str(tmp_path / "blank.txt"))
    refused("00001.txt belongs to both", validation_path=f"{path}/00001.txt")
    refused("source 'builtin' does not read", source="builtin", path="", validation_path=path)
    refused("source .hub. does not read; .* jsonl", source="hub", validation_path="test")
    refused("validation_split is .test.*; allowed with data.source hub", validation_split="test")
    refused("both 'train'", source="hub", validation_split="train")
    (tmp_path / "texts" / "train.jsonl").write_text('{"text": "a"}\n')
    refused("texts nope: .*Bad split", source="hub", validation_split="nope")


def test_data_prepared_before_there_were_validation_texts_is_used_as_it_is(tmp_path):
    shutil.copytree(WRITTEN_BEFORE / "data", tmp_path / "data")
    before = Manifest.load(tmp_path / "data")
    config = DataConfig(**before.settings, directory=str(tmp_path / "data"))
    assert prepare(config, lambda line: pytest.fail(line)) == before
    with pytest.raises(UserError, match="data.validation_path: prepared with '', now 'other'"):
        changed = dict(validation_path="other", validation_fraction=0.01)
        prepare(dataclasses.replace(config, **changed), quiet)
