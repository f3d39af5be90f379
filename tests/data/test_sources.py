"""Sources of documents and their splits: real files, however they are named, compressed and linked,
and the real `datasets` library. Nothing is left out without a word.
"""

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pandas
import pytest
from texts import (
    COMPRESSIONS,
    HARD,
    config_of,
    corpus,
    decoded_documents,
    documents_of,
    made_texts,
    quiet,
)

import mixer
from mixer.common.errors import UserError
from mixer.data import prepare as preparation
from mixer.data.config import DataConfig, Manifest
from mixer.data.prepare import Corpus, prepare
from mixer.reporting.figure import new_figure
from mixer.training.config import load_config


def lines(rows: list) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def settings(path, **changes) -> DataConfig:
    return DataConfig(source="jsonl", path=str(path), vocab_size=300, workers=1, **changes)


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_lines_are_read_alike_whatever_compresses_them(tmp_path, suffix):
    """Also where another field changes its type late, and after a byte order mark."""
    file = tmp_path / f"rows.jsonl{suffix}"
    rows = [{"text": f"document {n}", "note": None} for n in range(2000)]
    rows += [{"text": HARD, "note": "text"}, {"text": "x" * 5000, "note": [3, {}]}, {"text": "end"}]
    data = b"\xef\xbb\xbf" + lines(rows[:1]) + b"\n" + lines(rows[1:])
    file.write_bytes(COMPRESSIONS[suffix](data))
    assert documents_of(settings(tmp_path)) == [row["text"] for row in rows]
    (tmp_path / f"whole.txt{suffix}").write_bytes(COMPRESSIONS[suffix](data))
    text = DataConfig(source="text", path=f"{tmp_path}/*.txt*")
    assert documents_of(text) == [data.decode("utf-8-sig")]
    for line, problem in ((b'{"text": "\\ud83d"}\n', "surrogates"), (b'{"text": \n', "Expecting")):
        file.write_bytes(COMPRESSIONS[suffix](data + line + lines(rows)))
        with pytest.raises(UserError, match=f"cannot read row 2005 of {file}: .*{problem}"):
            documents_of(settings(file))
    file.write_bytes(COMPRESSIONS[suffix](data)[:-30])
    with pytest.raises(UserError, match=f"cannot read .*{file}: .*cut short"):
        documents_of(settings(file))


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_rows_is_read_too(tmp_path, indent):
    rows = [{"text": "one"}, {"text": "two", "n": 3}]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=indent))
    assert documents_of(settings(tmp_path)) == ["one", "two"]


@pytest.fixture
def linked(tmp_path):
    """A folder with a folder, a link to another one, and links in a circle."""
    for name in ("corpus/a/deep", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    for number, name in enumerate(("corpus/a/deep/p.jsonl", "elsewhere/q.jsonl", "corpus/r.jsonl")):
        (tmp_path / name).write_bytes(lines([{"text": f"document {number}"}]))
    (tmp_path / "corpus/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus/a/circle").symlink_to(tmp_path / "corpus")
    (tmp_path / "elsewhere/circle").symlink_to(tmp_path / "corpus")
    (tmp_path / "corpus/c.jsonl").symlink_to(tmp_path / "corpus/r.jsonl")
    return tmp_path / "corpus"


@pytest.mark.parametrize("names", ["", "/*", "/**", "/**/*", "/**/*.jsonl", "/../c*/**/*.jsonl"])
def test_every_way_of_naming_files_finds_the_same(linked, names):
    assert sorted(documents_of(settings(f"{linked}{names}"))) == [f"document {n}" for n in range(3)]


def test_what_is_not_read_in_a_folder_is_said_or_refused(linked, capsys):
    (linked / "a/more.jsonl.7z").touch()
    (linked / "a/.hidden").touch()
    documents_of(settings(linked))
    assert f"left out of {linked}: files not ending in .jsonl, " in capsys.readouterr().err
    (linked / "a/gone.jsonl").symlink_to("nowhere")
    with pytest.raises(UserError, match="a/gone.jsonl cannot be read .No such file"):
        documents_of(settings(linked))


def picture() -> bytes:
    """A PNG."""
    file = io.BytesIO()
    new_figure().savefig(file)
    return file.getvalue()


def test_pictures_among_texts_are_left_out_and_counted(tmp_path, capsys):
    """And where they are most of the files, the folder is refused: another may be meant."""
    folder, said = corpus(tmp_path / "texts", [*made_texts(3), HARD]), []
    for number in range(4):
        (folder / f"{number}.png").write_bytes(picture())
    config = config_of(tmp_path, path=str(folder), validation_fraction=0.5)
    prepare(config, said.append)
    left_out = f"left out: 4 of 8 files of {folder} are no text, such as {folder}/0.png"
    assert said.count(left_out) == 1
    assert sorted(documents_of(config)) == sorted([*made_texts(3), HARD])
    assert left_out in capsys.readouterr().err
    (folder / "numbers.npy").write_bytes(bytes(range(250)) * 4)
    with pytest.raises(UserError, match="5 of 9 files .* are no text, .*; at most 50%.*/[*].txt'"):
        documents_of(config)
    assert sorted(documents_of(dataclasses.replace(config, path=f"{folder}/**/*.txt")))


LANGUAGES = (
    "the cat sat on a mat\n",
    "Кот сидел на ковре.\n",
    "החתול ישב\n",
    "猫坐在垫子上，第12章\n",
)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", LANGUAGES)
def test_utf_16_among_texts_is_refused_by_name_with_or_without_its_mark(tmp_path, text, encoding):
    """Without the mark it may be valid UTF-8, with a null in every second place."""
    folder = corpus(tmp_path, made_texts(3))
    (folder / "one.txt").write_bytes((text * 9).encode(encoding))
    name = {"utf-16": "UTF-16LE"}.get(encoding, encoding.upper().replace("-LE", "LE"))
    name = name.replace("-BE", "BE")
    with pytest.raises(
        UserError, match=f"one.txt is not UTF-8 text, but {name}: .*iconv -f {name}"
    ):
        documents_of(DataConfig(source="text", path=str(folder)))


@pytest.mark.parametrize("encoding", ["latin-1", "cp1251", "shift-jis", "gb18030", "euc-jp"])
def test_text_in_another_encoding_is_refused_by_name_and_not_left_out(tmp_path, encoding):
    text = {"latin-1": "déjà vu\n", "cp1251": LANGUAGES[1]}.get(encoding, "猫犬第12\n")
    folder = corpus(tmp_path, made_texts(3))
    (folder / "one.txt").write_bytes((text * 9).encode(encoding))
    with pytest.raises(UserError, match="one.txt is not UTF-8 text .*iconv"):
        documents_of(DataConfig(source="text", path=str(folder)))


@pytest.mark.skipif(not shutil.which("zstd"), reason="needs the command zstd")
def test_a_zstd_file_with_a_long_window_says_how_to_write_it_anew(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines([{"text": "one"}]))
    name = f"{tmp_path}/rows.jsonl"
    with open(name, "rb") as rows:  # of unknown size, as from a pipe
        subprocess.run(["zstd", "-q", "--long=28", "-o", f"{name}.zst"], stdin=rows, check=True)
    with pytest.raises(UserError, match="window is above 128 MiB: zstd -d --long=31 FILE, and"):
        documents_of(settings(f"{name}.zst"))


@pytest.mark.parametrize("suffix", [".zst", ".gz", ".parquet"])
def test_files_whose_names_are_no_text_are_read(tmp_path, suffix):
    file = tmp_path / os.fsdecode(b"caf\xe9.jsonl" + suffix.encode())
    if suffix == ".parquet":
        rows = pandas.DataFrame({"text": ["one"]}).to_parquet()
        config = DataConfig(source="parquet", path=str(tmp_path))
    else:
        rows, config = COMPRESSIONS[suffix](lines([{"text": "one"}])), settings(tmp_path)
    file.write_bytes(rows)
    assert documents_of(config) == ["one"]


def test_a_folder_without_permission_is_named(linked):
    (linked / "a/deep").chmod(0)
    give_up = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    give_up = give_up if os.getuid() == 0 else []
    if give_up and (not shutil.which("setpriv") or subprocess.run([*give_up, "true"]).returncode):
        pytest.skip("root without setpriv")
    program = (  # without the package's own imports, which take seconds
        "import sys, types\nmixer = sys.modules['mixer'] = types.ModuleType('mixer')\n"
        f"mixer.__path__ = {mixer.__path__}\nfrom mixer.data.sources import *\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(local_files(DataConfig(source='jsonl', path=path)))\n"
        "    except UserError as error: print(error)\n"
    )
    paths = [f"{linked}{names}" for names in ("", "/**/*.jsonl", "/*", "/a/*/*.jsonl")]
    found = subprocess.check_output([*give_up, sys.executable, "-c", program, *paths], text=True)
    assert found.count("/a/deep cannot be read (Permission denied)") == len(paths), found


@pytest.mark.parametrize("missing", [40, 5])
def test_rows_without_the_field_are_counted_and_many_are_refused(tmp_path, capsys, missing):
    rows = [{"content": "other"}, {"text": None}] * (missing // 2) + [{}] * (missing % 2)
    rows += [{"text": f"document {n}"} for n in range(100 - missing)] + [
        {"text": " "},
        {"text": ""},
    ]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    config, said = settings(tmp_path / "rows.jsonl", directory=str(tmp_path / "data/d")), []
    if missing > 10:
        with pytest.raises(UserError, match="40 of 100 entries .* have no text in field"):
            prepare(config)
        assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
        return
    assert len(documents_of(config)) == 95
    prepare(config, said.append)
    err = capsys.readouterr().err
    for expected in (
        f"left out: 5 of 100 entries of {config.path} have no text in field 'text'",
        f"left out: 2 of 102 texts of {config.path} are empty, or white space",
    ):
        assert expected in said and expected in err


def test_a_failed_preparation_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 200)
    rows = [{"text": f"document {n}"} for n in range(100)] + [{"text": 3}]
    (tmp_path / "bad.jsonl").write_bytes(lines(rows))
    for workers in (1, 2):
        config = settings(tmp_path / "bad.jsonl", directory=str(tmp_path / "d/e"))
        with pytest.raises(UserError, match="row 101 of .* holds int"):
            prepare(dataclasses.replace(config, workers=workers), quiet)
        assert [file.name for file in tmp_path.iterdir()] == ["bad.jsonl"]


@pytest.mark.parametrize("name", ["recipe", "comparison"])
def test_the_shipped_configurations_take_a_validation_text_of_ones_own(tmp_path, name):
    for file in ("train", "held-out"):
        (tmp_path / f"{file}.jsonl").write_bytes(lines([{"text": f"{file} one"}]))
    given = f"source=jsonl path={tmp_path}/train.jsonl vocab_size=300 directory={tmp_path}/d"
    given = [f"data.{one}" for one in given.split()]
    given += [f"data.validation_path={tmp_path}/held-out.jsonl"]
    config = load_config(f"configs/{name}.yaml", given).data
    manifest = prepare(config, quiet)
    assert [split.documents for split in manifest.splits.values()] == [1, 1]
    other = dataclasses.replace(config, validation_fraction=0.3)  # which is not used
    assert prepare(other, quiet) == manifest


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_the_training_text_under_another_name_is_no_validation_text(tmp_path, link):
    (tmp_path / "rows.jsonl").write_bytes(lines([{"text": "one"}, {"text": "two"}]))
    link(tmp_path / "rows.jsonl", tmp_path / "other.jsonl")
    changes = {"validation_path": f"{tmp_path}/other.jsonl", "directory": f"{tmp_path}/d"}
    with pytest.raises(UserError, match="rows.jsonl belongs to both data.path and data.validation"):
        prepare(settings(tmp_path / "rows.jsonl", **changes), quiet)


def test_a_dataset_saved_to_disk_is_named_where_it_is_no_source(tmp_path):
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"text": ["one"]})
    for name, saved in ("saved", rows), ("splits", DatasetDict(test=rows, train=rows)):
        saved.save_to_disk(tmp_path / name / name)
        for source in ("jsonl", "parquet", "text"):
            with pytest.raises(UserError, match=f"{name} was written by save_to_disk.*source=hub"):
                documents_of(DataConfig(source=source, path=str(tmp_path / name)))


@pytest.mark.parametrize(
    "name, kind", [("a.jsonl", "jsonl"), ("A.NDJSON.bz2", "jsonl"), ("b.parquet", "parquet")]
)
def test_rows_are_not_taken_for_one_document(tmp_path, name, kind):
    (tmp_path / "notes.txt").write_text("one")
    (tmp_path / "package.JSON").write_text("{}")  # belongs to source code
    config = DataConfig(source="text", path=str(tmp_path))
    assert sorted(documents_of(config)) == ["one", "{}"]
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=f"{name} has a document in each row.*={kind}") as error:
        documents_of(config)
    (suggested,) = re.findall(r"such as data.path='(.*)'$", str(error.value))
    assert documents_of(dataclasses.replace(config, path=suggested)) == ["one"]


# --- other sources -----------------------------------------------------------


def test_builtin_corpus_is_prepared_from_the_running_python(tmp_path):
    config = DataConfig(directory=str(tmp_path / "b"), max_documents=50, vocab_size=400)
    manifest = prepare(config, quiet)
    assert sum(split.documents for split in manifest.splits.values()) == 50
    everything = set(documents_of(dataclasses.replace(config, max_documents=0)))
    assert Path(os.__file__).read_text() in everything
    assert Path(pytest.__file__).read_text() not in everything  # of the standard library alone


def test_the_builtin_corpus_takes_in_the_installed_packages_and_drops_copies(tmp_path, monkeypatch):
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
    packages = f"{tmp_path}/purelib"
    paths = {"stdlib": f"{tmp_path}/stdlib", "purelib": packages, "platlib": packages}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    everything = documents_of(DataConfig(subset="packages"))
    assert sorted(everything) == ["first a", "system", "third"]
    assert documents_of(DataConfig(subset="packages", max_documents=2)) == everything[:2]
    assert documents_of(DataConfig()) == ["system"]
    # the order is that of the names below the folder
    shutil.move(tmp_path / "purelib", tmp_path / "elsewhere")
    paths["purelib"] = paths["platlib"] = str(tmp_path / "elsewhere")
    assert documents_of(DataConfig(subset="packages")) == everything


def test_text_is_one_document_a_file(tmp_path, capsys):
    folder = corpus(tmp_path / "texts", ["first\r\n", "second"])
    (folder / ".hidden").write_text("no")
    (folder / "empty.txt").write_text(" \n")
    (folder / "marked.txt").write_text("third", "utf-8-sig")
    texts = documents_of(DataConfig(source="text", path=str(folder)))
    assert texts == ["first\r\n", "second", "third"]
    assert f"left out: 1 of 4 texts of {folder} are empty, or white" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("source=text", "data.path is empty"),
        ("path=mine", "data.path is 'mine', which source 'builtin' does not read"),
        ("subset=sample-10BT", "data.subset is 'sample-10BT'; source builtin allows packages"),
        ("validation_path=mine", "source 'builtin' does not read"),
        ("source=hub path=x validation_path=test", "source 'hub' does not read; .* jsonl"),
        ("source=text path=x validation_split=test", "is 'test'.*; allowed with data.source hub"),
        ("source=hub path=x validation_split=train", "both 'train'"),
        ("source=hub path=saved validation_split=test", "saved has no splits"),
        ("source=hub path=saved split=test", "saved has no splits"),
        (
            "source=text validation_split=test name=a/b",
            r"(?s)3 problems.*name.*split.*path is empty",
        ),
    ],
)
def test_options_that_do_not_go_together_are_in_the_one_report(tmp_path, monkeypatch, given, said):
    monkeypatch.chdir(tmp_path)
    Path("saved").mkdir()
    Path("saved/state.json").write_text("{}")  # as in a dataset saved without splits
    keys = [key if key.startswith("name") else f"data.{key}" for key in given.split()]
    with pytest.raises(UserError, match=said):
        load_config(None, keys)


@pytest.mark.parametrize(
    "settings, problem",
    [
        ("source=text path=missing.txt", "'missing.txt' does not exist"),
        ("source=text path=/dev/null", "'/dev/null' is no file, but a pipe or device"),
        ("source=text path=latin.txt", "latin.txt is not UTF-8 text .*0xe9 in position 3.*iconv"),
        ("source=text path=picture.png", "1 of 1 files of picture.png are no text, .* a glob of"),
        ("source=jsonl path=lines.json", "row 1 .*; each line must hold an object, or the file"),
        ("source=text path=blank.txt", "corpus is empty"),
        ("source=parquet path=.", "is a folder without files ending in .parquet"),
        ("source=jsonl path=rows.jsonl", "no text in field 'text'; fields of the first: body, id"),
        ("source=jsonl path=rows.jsonl text_field=id", "holds int, not text"),
        ("source=jsonl path=null.jsonl", "row 2 of null.jsonl: .* NoneType, not an object"),
    ],
)
def test_source_errors_say_what_to_do(tmp_path, monkeypatch, settings, problem):
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("blank.txt").write_text("\n")
    Path("picture.png").write_bytes(picture())
    Path("lines.json").write_text(json.dumps({"text": "x"}, indent=1))
    Path("rows.jsonl").write_text('{"body": "x", "id": 3}\n')
    Path("null.jsonl").write_text('{"text": "x"}\nnull\n')
    with pytest.raises(UserError, match=problem):
        documents_of(DataConfig(**dict(setting.split("=") for setting in settings.split())))


# --- splits: no text is in both, and none changes sides -----------------------


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


def test_two_documents_are_one_each(tmp_path):
    config, said = config_of(tmp_path, ["short", *made_texts(1)], validation_fraction=0.001), []
    assert [split.documents for split in prepare(config, said.append).splits.values()] == [1, 1]
    assert "add text or give another data.validation_path" in said[-1]


@pytest.mark.parametrize("copies", [1, 3])
def test_the_end_of_a_single_document_is_held_out_and_said(tmp_path, copies):
    lines = [f"line {number}\n" for number in range(3000)]
    for name, text, share, size in (
        ("short", "".join(lines[:100]), 0.01, 79),  # a tenth
        ("long", "".join(lines), 0.01, 2889),  # a tenth
        ("longer", "".join(lines) * 10, 0.01, 10_000),
        ("asked", "".join(lines), 0.5, 14_445),
        ("words", "word " * 1000, 0.1, 500),
    ):
        said, own = [], tmp_path / name
        config = config_of(own, [text] * copies, validation_fraction=share)
        manifest = prepare(config, said.append)
        (training,), (held_out,) = (decoded_documents(own / "prepared", s) for s in manifest.splits)
        assert training + held_out == text and size <= len(held_out) <= size + 10
        assert name == "words" or training.endswith("\n")
        number = f"there are {copies} copies of one" if copies > 1 else "there is one"
        share = f"{len(held_out):,} of its {len(text):,} characters"
        assert f"{number} document: its end is for validation, {share}" in said


@pytest.mark.parametrize("changes", [{"pair_field": "answer"}, {}])
def test_a_single_document_that_cannot_be_cut_is_refused(tmp_path, changes):
    (tmp_path / "rows.jsonl").write_bytes(lines([{"text": "x", "answer": "one"}]))
    config = settings(tmp_path / "rows.jsonl", directory=str(tmp_path / "prepared"), **changes)
    with pytest.raises(UserError, match="has 1 document .*validation needs .* add files"):
        prepare(config, quiet)
    assert not Path(config.directory).exists()


def test_the_first_documents_are_held_out_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("mixer.data.prepare.BATCH_CHARACTERS", 3000)  # several batches
    texts = [*made_texts(40), made_texts(1)[0], HARD]
    config = config_of(tmp_path, texts, validation_documents=7, workers=2)
    prepare(config, quiet)
    assert decoded_documents(config.directory, "validation") == texts[:7]
    assert decoded_documents(config.directory, "train") == texts[7:]
    none = dataclasses.replace(config, validation_documents=42, directory=str(tmp_path / "none"))
    with pytest.raises(UserError, match="_documents = 42 leaves no document .*: lower it"):
        prepare(none, quiet)


def test_a_validation_text_of_its_own_is_all_of_the_validation_split(tmp_path):
    train, held_out = made_texts(20), [*made_texts(3, seed=1), HARD]
    train.append(held_out[0])  # a copy does not change sides
    own = dict(validation_path=str(corpus(tmp_path / "held out", held_out)), max_documents=21)
    config, said = config_of(tmp_path, train, **own), []
    manifest = prepare(config, said.append)
    assert not any("max_documents" in line for line in said)
    for split, texts in (("train", train), ("validation", held_out)):
        assert decoded_documents(config.directory, split) == texts
        assert manifest.splits[split].documents == len(texts)
    one = dataclasses.replace(config, max_documents=1, directory=str(tmp_path / "one"))
    assert [split.documents for split in prepare(one, said.append).splits.values()] == [1, 4]
    assert said.count("data.max_documents = 1: the text has more; 0 reads all of it") == 1


def test_a_validation_text_may_be_rows_of_a_file_or_a_split_of_the_hub(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "held out"}\n')
    rows = settings(tmp_path / "tr*.jsonl", validation_path=str(tmp_path / "test.jsonl"))
    hub = DataConfig(source="hub", path=str(tmp_path), validation_split="test")
    for config in (rows, hub):
        found = list(Corpus(config).documents(quiet))
        assert found == [("validation", "held out"), ("train", "a b"), ("train", "c")]


def test_splits_saved_to_disk_have_their_own_names(tmp_path):
    from datasets import Dataset, DatasetDict

    texts = {"val": ["held out"], "a": ["a b", "c"], "b": ["of no split that is asked for"]}
    splits = {name: Dataset.from_dict({"text": rows}) for name, rows in texts.items()}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    config = DataConfig("hub", str(tmp_path / "saved"), split="a", validation_split="val")
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

    refused("missing' does not exist", validation_path=str(tmp_path / "missing"))
    (tmp_path / "blank.txt").write_text("\n")
    refused("no document with text in .*blank", validation_path=str(tmp_path / "blank.txt"))
    (tmp_path / "texts" / "train.jsonl").write_text('{"text": "a"}\n')
    refused("texts nope: .*Bad split", source="hub", validation_split="nope")


def test_data_prepared_before_there_were_validation_texts_is_used_as_it_is(tmp_path):
    written = Path(__file__).parents[1] / "checkpoints/written_before/data"
    shutil.copytree(written, tmp_path / "data")
    before = Manifest.load(tmp_path / "data")
    config = DataConfig(**before.settings, directory=str(tmp_path / "data"))
    assert prepare(config, lambda line: pytest.fail(line)) == before
    with pytest.raises(UserError, match="data.validation_path: prepared with '', now 'other'"):
        changed = dict(validation_path="other", validation_fraction=0.01)
        prepare(dataclasses.replace(config, **changed), quiet)
