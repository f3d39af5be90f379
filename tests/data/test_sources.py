"""Where documents come from: real files and the real `datasets` library."""

import dataclasses
import os
import shutil
import sysconfig
from pathlib import Path

import pytest
from texts import corpus, documents_of, quiet

from mixer.common.errors import UserError
from mixer.data.config import DataConfig
from mixer.data.prepare import prepare


def test_builtin_corpus_is_prepared_from_the_running_python(tmp_path):
    config = DataConfig(directory=str(tmp_path / "b"), max_documents=50, vocab_size=400)
    manifest = prepare(config, quiet)
    assert sum(split.documents for split in manifest.splits.values()) == 50
    everything = set(documents_of(dataclasses.replace(config, max_documents=0)))
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
    everything = documents_of(DataConfig(subset="packages"))
    assert sorted(everything) == ["first a", "system", "third"]
    assert documents_of(DataConfig(subset="packages", max_documents=2)) == everything[:2]
    assert documents_of(DataConfig()) == ["system"]
    # the order is that of the names below the folder
    shutil.move(folders["purelib"], tmp_path / "elsewhere")
    paths["purelib"] = paths["platlib"] = str(tmp_path / "elsewhere")
    assert documents_of(DataConfig(subset="packages")) == everything


@pytest.mark.parametrize("form", ["file", "directory", "glob"])
def test_text_is_one_document_a_file(tmp_path, form):
    folder = corpus(tmp_path / "texts", ["first\r\n", "second"])
    (folder / ".hidden").write_text("no")
    (folder / "empty.txt").write_text(" \n")
    path = {"file": folder / "00000.txt", "directory": folder, "glob": folder / "0*.txt"}[form]
    expected = ["first\r\n"] if form == "file" else ["first\r\n", "second"]
    assert documents_of(DataConfig(source="text", path=str(path))) == expected


def test_hub_dataset_streams_a_split(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": "b"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "held out"}\n')
    config = DataConfig(source="hub", path=str(tmp_path))
    assert documents_of(config) == ["a", "b"]
    assert documents_of(dataclasses.replace(config, split="test")) == ["held out"]
    assert documents_of(dataclasses.replace(config, max_documents=1)) == ["a"]
    with pytest.raises(UserError, match="hub dataset .* nope: .*Bad split"):
        documents_of(dataclasses.replace(config, split="nope"))


def test_source_errors_say_what_to_do(tmp_path):
    def refused(match, **settings):
        with pytest.raises(UserError, match=match):
            documents_of(DataConfig(**settings))

    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin1"))
    (tmp_path / "blank.txt").write_text("\n")
    (tmp_path / "rows.jsonl").write_text('{"body": "x", "id": 3}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (tmp_path / "none.jsonl").write_text("\n")
    refused("'csv'; allowed: builtin, text, jsonl, parquet, hub", source="csv")
    refused("data.path is empty", source="text")
    refused("data.path is 'mine', which source 'builtin' does not read", path="mine")
    refused("data.path: .* is no file", source="text", path=str(tmp_path / "missing.txt"))
    refused(
        "latin.txt: .*0xe9 in position 3.*iconv",
        source="text",
        path=str(tmp_path / "latin.txt"),
    )
    refused("corpus is empty", source="text", path=str(tmp_path / "blank.txt"))
    refused("no folder that holds a file ending in .parquet", source="parquet", path=str(tmp_path))
    refused(
        "no field 'text'; its fields: body, id", source="jsonl", path=str(tmp_path / "rows.jsonl")
    )
    refused(
        "holds int, not text", source="jsonl", path=str(tmp_path / "rows.jsonl"), text_field="id"
    )
    refused("cannot read row 2 of .*broken", source="jsonl", path=str(tmp_path / "broken.jsonl"))
    refused("corpus is empty", source="jsonl", path=str(tmp_path / "none.jsonl"))
    refused("data.subset is 'sample-10BT'; source builtin allows packages", subset="sample-10BT")
    refused("vocab_size = 256; allowed: 257 or more", vocab_size=256)
    for fraction in (0.0, 1.0, float("nan")):
        refused("validation_fraction = .*; allowed: above 0", validation_fraction=fraction)
