"""What the benchmarks make of a collection in BEIR's layout: pairs to train on, and BM25's row."""

import json

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
        ("mouse sleep", whole),
        ("Mice sleep less than cats do.", whole),
        ("Their sleep, e.g. at night, is light!", whole),
        ("mice eating", alone),
        (alone, alone),
    ]
    arguments = [str(folder), "--output", str(tmp_path / "pairs.jsonl"), "--split", split]
    monkeypatch.setattr("sys.argv", ["beir_pairs.py", *arguments])
    beir_pairs.main()
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    pairs = [(row["query"], row["document"]) for row in map(json.loads, lines)]
    assert pairs == [pair for pair in expected if split or pair[0] not in queries]


def test_bm25_finds_documents_by_their_words_alone(folder):
    pytest.importorskip("bm25s", reason="pip install -c constraints.txt -e .[bench]")
    from bm25 import rankings_of

    from mixer.evaluation.beir import read_collection

    found = rankings_of(read_collection(folder, "train"))
    assert found == {"q1": ["d1"], "q2": ["d2", "d1"]}
