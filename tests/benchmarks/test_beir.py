"""What the benchmarks make of a collection in BEIR's layout: pairs to train on, and BM25's row; and
the collection of functions that they make of packages.
"""

import json
import sysconfig

import pytest

ABSTRACT = "Mice sleep less than cats do. Too short. Their sleep, e.g. at night, is light!"
DOCUMENTS = [
    {"_id": "d1", "title": "Sleep of mice", "text": ABSTRACT},
    {"_id": "d2", "title": "", "text": "No sentence in here is about what mice eat."},
    {"_id": "d3", "title": "A title alone", "text": ""},
]
QUERIES = [{"_id": "q1", "text": "mouse sleep"}, {"_id": "q2", "text": "mice eating"}]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\nq2\td2\t2\n"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "three"
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "qrels/train.tsv").write_text(QRELS)
    return folder


@pytest.mark.parametrize("split", ["train", ""])
def test_a_document_gives_pairs_with_its_title_its_sentences_and_its_queries(
    folder, split, tmp_path, monkeypatch
):
    import beir_pairs

    whole = f"Sleep of mice {ABSTRACT}"
    alone = DOCUMENTS[1]["text"]
    queries = {query["text"] for query in QUERIES}
    expected = [
        ("Sleep of mice", ABSTRACT),
        ("mice eating", alone),
        ("mouse sleep", whole),
        (alone, alone),
        ("Mice sleep less than cats do.", whole),
        ("Their sleep, e.g. at night, is light!", whole),
    ]
    if not split:  # the two documents' pairs take turns
        expected[1:4] = expected[3], expected[1], expected[2]
    arguments = [str(folder), "--output", str(tmp_path / "pairs.jsonl"), "--split", split]
    monkeypatch.setattr("sys.argv", ["beir_pairs.py", *arguments])
    beir_pairs.main()
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    pairs = [(row["query"], row["document"]) for row in map(json.loads, lines)]
    assert pairs == [pair for pair in expected if split or pair[0] not in queries]


def test_groups_of_documents_follow_each_other_and_the_first_ones_size_is_printed(
    folder, tmp_path, monkeypatch, capsys
):
    import beir_pairs

    monkeypatch.setattr(beir_pairs, "DOCUMENTS", 1)
    pairs = tmp_path / "pairs.jsonl"
    monkeypatch.setattr("sys.argv", ["beir_pairs.py", str(folder), "--output", str(pairs)])
    beir_pairs.main()
    documents = [json.loads(line)["document"] for line in pairs.read_text().splitlines()]
    assert [ABSTRACT in document for document in documents] == [True, True, True, False]
    said = f"4 pairs are in {pairs}, those of the first 1 documents in its first 3 lines"
    assert said in capsys.readouterr().out


def test_bm25_finds_documents_by_their_words_alone(folder):
    pytest.importorskip("bm25s", reason="pip install -c constraints.txt -e .[bench]")
    from bm25 import rankings_of

    from mixer.evaluation.beir import read_collection

    found = rankings_of(read_collection(folder, "train"))
    assert found == {"q1": ["d1"], "q2": ["d2", "d1"]}


@pytest.mark.parametrize(("identifiers", "found"), [(True, ["d1"]), (False, [])])
def test_bm25_may_read_the_words_that_names_of_code_are_made_of(folder, identifiers, found):
    pytest.importorskip("bm25s", reason="pip install -c constraints.txt -e .[bench]")
    from bm25 import rankings_of

    from mixer.evaluation.beir import read_collection

    code = [{"_id": "d1", "text": "def read_csvHTTPFile(x):"}, {"_id": "d2", "text": "pass"}]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, code)))
    queries = [{"_id": "q1", "text": "reads a file by HTTP"}, {"_id": "q2", "text": "_ of the"}]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    rankings = rankings_of(read_collection(folder, "train"), identifiers)
    assert rankings == {"q1": found, "q2": []}


SHARED = '''
def merge(left, right):
    """Merge two sorted lists into a new one."""
    result = []
    while left and right:
        source = left if left[0] <= right[0] else right
        result.append(source.pop(0))
    return result + left + right
'''
FILES = {
    "held/__init__.py": '''
import functools

class Queue:
    """A class is no document."""

    @functools.cache
    def take(self, count: int) -> list:
        """Take so many items
        from the front.

        Not of the query.
        """
        # a comment stays

        def inner():
            """A docstring inside of another function."""
            return count
        return self.items[:inner()]

    def short(self):
        """One line alone is left out, as it says little."""
        return self.items

def brief(x):
    """Too few words."""
    x += 1
    return x

def crowded(x): """Take so many items from the front."""; \\
    x += 1; \\
    return x

if True:
    async def twice(x):
        """Take so many items from the front."""
        y = x + x
        return y
''',
    "held/vendor.py": SHARED,
    "other/merge.py": SHARED.replace("Merge two sorted lists into", "Joins both of them to"),
    "other/query.py": '''
def another(a, b, c):
    """Merge two sorted lists into a new one."""
    return a if b < c else [
        item for item in a if item is not b
    ]
''',
    "other/good.py": '''
def mean(numbers):
    """The arithmetic mean of some numbers."""
    total = sum(numbers)
    return total / len(numbers)
''',
    "other/broken.py": "def broken(:\n",
    "single.py": '''
def single(path):
    r"""Reads a file that \\d names.
    """
    with open(path) as file:
        return file.read()
''',
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Installed ones, of which `held` alone is held out."""
    installed = tmp_path / "site-packages"
    for name, text in FILES.items():
        file = installed / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (installed / "latin.py").write_bytes('def f():\n    """Ä"""'.encode("latin-1"))
    library = tmp_path / "library"
    library.mkdir()
    (library / "library.py").write_text(FILES["other/good.py"].replace("mean", "median"))
    paths = {"stdlib": str(library), "purelib": str(installed), "platlib": str(installed)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    return tmp_path


def test_functions_are_found_by_docstrings_and_copies_are_no_pairs(packages, monkeypatch, capsys):
    import functions

    from mixer.evaluation.beir import read_collection, read_entries

    monkeypatch.setattr(functions, "text_hash", lambda name: (2**64 - 1) * (name == "held"))
    folder = packages / "functions"
    monkeypatch.setattr("sys.argv", ["functions.py", str(folder), "--held-out", "0.1"])
    functions.main()
    collection = read_collection(folder, "test")
    take, twice, merge = "held/__init__.py:8", "held/__init__.py:35", "held/vendor.py:2"
    relevant = {
        collection.queries[query]: sorted(documents)
        for query, documents in collection.relevance.items()
    }
    assert relevant == {
        "Take so many items from the front.": sorted([take, twice]),
        "Merge two sorted lists into a new one.": [merge],
    }
    texts = {entry.id: entry.text for entry in read_entries(folder / "corpus.jsonl")}
    assert texts.keys() == {take, twice, merge}
    assert texts[take] == (
        "@functools.cache\n"
        "def take(self, count: int) -> list:\n"
        "    # a comment stays\n"
        "    def inner():\n"
        "        return count\n"
        "    return self.items[:inner()]"
    )
    assert texts[twice] == "async def twice(x):\n    y = x + x\n    return y"
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    queries = sorted(pair["query"] for pair in pairs)
    assert queries == [
        "Reads a file that \\d names.",
        "The arithmetic mean of some numbers.",
        "The arithmetic median of some numbers.",
    ]
    printed = capsys.readouterr().out
    assert "3 documents, 2 queries" in printed
    assert "held out: 3 functions of 1 package: held 3" in printed
    assert "pairs: 3 functions of 3 packages" in printed
    assert "left out, as copies: 2 functions of 1 package: other 2" in printed
    before = {file: file.read_bytes() for file in folder.glob("*.jsonl")}
    functions.main()
    assert {file: file.read_bytes() for file in folder.glob("*.jsonl")} == before


@pytest.mark.parametrize("share", ["0", "1.5"])
def test_a_share_that_holds_out_nothing_or_all_is_refused(packages, share, monkeypatch):
    import functions

    from mixer.common.errors import UserError

    monkeypatch.setattr("sys.argv", ["functions.py", str(packages / "out"), "--held-out", share])
    with pytest.raises(UserError, match="allowed: above 0, below 1"):
        functions.main()
    assert not (packages / "out").exists()
