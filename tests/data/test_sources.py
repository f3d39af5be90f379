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


def test_text_is_one_document_a_file(tmp_path):
    folder = corpus(tmp_path / "texts", ["first\r\n", "second"])
    (folder / ".hidden").write_text("no")
    (folder / "empty.txt").write_text(" \n")
    assert documents_of(DataConfig(source="text", path=str(folder))) == ["first\r\n", "second"]


TEXT_FILES = {
    "latin.txt": b"caf\xe9",
    "blank.txt": b"\n",
    "rows.jsonl": b'{"body": "x", "id": 3}\n',
}


@pytest.mark.parametrize(
    "settings, problem",
    [
        ("source=text", "data.path is empty"),
        ("path=mine", "data.path is 'mine', which source 'builtin' does not read"),
        ("subset=sample-10BT", "data.subset is 'sample-10BT'; source builtin allows packages"),
        ("source=text path=missing.txt", "'missing.txt' is no file"),
        ("source=text path=latin.txt", "latin.txt: .*0xe9 in position 3.*iconv"),
        ("source=text path=blank.txt", "corpus is empty"),
        ("source=parquet path=.", "no folder that holds a file ending in .parquet"),
        ("source=jsonl path=rows.jsonl", "no text in field 'text'; fields of the first: body, id"),
        ("source=jsonl path=rows.jsonl text_field=id", "holds int, not text"),
    ],
)
def test_source_errors_say_what_to_do(tmp_path, monkeypatch, settings, problem):
    monkeypatch.chdir(tmp_path)
    for name, content in TEXT_FILES.items():
        Path(name).write_bytes(content)
    with pytest.raises(UserError, match=problem):
        documents_of(DataConfig(**dict(setting.split("=") for setting in settings.split())))
