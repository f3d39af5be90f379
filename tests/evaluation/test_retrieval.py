"""Promises of eval.py --retrieval: its measures are a public evaluator's on the same ranking, the
ranking is that of a model's vectors, and a folder that is none is met with one line.
"""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import CONTEXT, WORDS, evaluate, save_checkpoint

from mixer.checkpoints.pretrained import load_checkpoint
from mixer.commands.eval import main as evaluate_main
from mixer.common.errors import UserError
from mixer.evaluation import beir
from mixer.evaluation.beir import measures, ranked, read_collection, read_entries
from mixer.evaluation.evaluate import evaluation_report
from mixer.evaluation.search import sort_keys
from mixer.objectives.retrieval import text_vectors

NAMES = {"ndcg_at_10": "ndcg_cut_10", "recall_at_100": "recall_100"}


def public_measures(scores: dict, relevance: dict) -> dict[str, float]:
    """As BEIR has them of pytrec_eval, by our names. It has no MRR@10: of the ten with the highest
    scores, as trec_eval orders them, the reciprocal rank.
    """
    pytrec_eval = pytest.importorskip(
        "pytrec_eval", reason="pip install -c constraints.txt -e .[dev]"
    )
    evaluator = pytrec_eval.RelevanceEvaluator(relevance, {"ndcg_cut.10", "recall.100"})
    reciprocal = pytrec_eval.RelevanceEvaluator(relevance, {"recip_rank"})
    of_queries = evaluator.evaluate(scores)
    found = {
        name: np.mean([row[theirs] for row in of_queries.values()])
        for name, theirs in NAMES.items()
    }
    ranks = [row["recip_rank"] for row in reciprocal.evaluate(scores).values()]
    found["mrr_at_10"] = np.mean([rank if rank > 1 / 10.5 else 0 for rank in ranks])
    return found


def random_case(seed: int) -> tuple[dict, dict]:
    """The scores of 150 documents, many of them equal, for each of 20 queries; grades from -1 to
    3, of some queries none above 0.
    """
    generator = random.Random(seed)
    documents = [str(generator.randrange(10**6)) for _ in range(149)] + ["é日"]
    scores = {}
    relevance = {}
    for number in range(20):
        values = generator.choice([2, 10, 1000])
        scores[f"q{number}"] = {d: generator.randrange(-values, values) / 8 for d in documents}
        judged = generator.sample(documents, generator.choice([1, 5, 140]))
        grades = generator.choice([[0], [1], [-1, 0, 1, 2, 3]])
        relevance[f"q{number}"] = {d: generator.choice(grades) for d in [*judged, "not ranked"]}
    return scores, relevance


@pytest.mark.parametrize("seed", range(5))
def test_measures_are_those_of_pytrec_eval_also_where_scores_are_equal(seed):
    scores, relevance = random_case(seed)
    found = measures({query: ranked(row) for query, row in scores.items()}, relevance)
    assert found == pytest.approx(public_measures(scores, relevance), rel=1e-9)
    assert 0 < found["mrr_at_10"] < 1


def test_measures_of_one_query_are_these():
    """What pytrec_eval-terrier 0.5.11 says of it; the reciprocal rank by hand."""
    relevance = {"q": {"a": 1, "b": 0, "c": 2, "e": -1, "f": 1}}
    rankings = {"q": ["b", "c", "d", "a", *map(str, range(95)), "f"]}
    expected = {"ndcg_at_10": 0.5405858, "recall_at_100": 1.0, "mrr_at_10": 0.5}
    assert measures(rankings, relevance) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_by_which_documents_are_kept_is_the_public_one(seed):
    """Of scores that are negative, equal, and 0 and -0."""
    scores, _ = random_case(seed)
    ids = sorted(scores["q0"])
    matrix = torch.tensor([[row[name] for name in ids] for row in scores.values()])
    matrix = torch.where(matrix.eq(0) & (torch.arange(len(ids)) % 2 == 0), -0.0, matrix)
    order = sort_keys(matrix, torch.arange(len(ids))).topk(100).indices
    for places, row in zip(order, scores.values(), strict=True):
        assert [ids[place] for place in places] == ranked(row)


# ------------------------------------------------------------------------------------- a collection


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "mixer"
    save_checkpoint(directory, "masked_mixer")
    return directory


@pytest.fixture
def folder(tmp_path) -> Path:
    """Ten documents, of no word to far more than the context, not in the order of ids: two are
    copies, and one has the id of a query; four queries, of which the test split judges three.
    """
    generator = random.Random(0)
    sizes = [0, 1, 5, 200, 9, 40, 7, 3, 12]
    texts = [" ".join(generator.choices(WORDS, k=size)) for size in sizes]
    documents = [{"_id": f"d{n}", "title": WORDS[n], "text": t} for n, t in enumerate(texts)]
    documents[0]["title"] = ""
    documents[1]["title"] = None
    documents.insert(0, {"metadata": {}, "_id": "q2", "text": f"{WORDS[4]} {texts[4]}"})
    queries = [{"_id": f"q{n}", "text": f"{WORDS[n]} {texts[n]}"} for n in (1, 2, 3, 4)]
    folder = tmp_path / "ten"
    write_rows(folder / "corpus.jsonl", documents)
    write_rows(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    head = "query-id\tcorpus-id\tscore\n"
    lines = "q1\td1\t1\nq2\tq2\t1\nq2\td4\t2\nq3\td3\t0\nq3\td5\t1\n"
    (folder / "qrels/test.tsv").write_text(head + lines)
    (folder / "qrels/dev.tsv").write_text(head + "q4\td4\t1\n")
    return folder


def write_rows(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def one_at_a_time(checkpoint: Path, folder: Path) -> tuple[dict, dict, int]:
    """The cosines of all queries and documents but those of one id or without tokens, the
    relevance, and how many texts are cut.
    """
    model, tokenizer = load_checkpoint(checkpoint, torch.device("cpu"), "")
    cut = 0

    def vector(text: str) -> torch.Tensor:
        nonlocal cut
        tokens = tokenizer.encode(text)
        cut += len(tokens) > CONTEXT
        with torch.no_grad():
            return text_vectors(model, torch.tensor([tokens[:CONTEXT] or [-100]]))[0]

    collection = read_collection(folder, "test")
    vectors = dict(zip(collection.document_ids, map(vector, collection.documents()), strict=True))
    scores = {}
    for query, text in collection.queries.items():
        own = vector(text)
        found = {name: v for name, v in vectors.items() if name != query and v.any()}
        scores[query] = {name: (own @ v).item() for name, v in found.items()}
    return scores, collection.relevance, cut


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_a_model_finds_what_its_vectors_say_whatever_the_batches(
    checkpoint, folder, batch_size, monkeypatch
):
    monkeypatch.setattr("mixer.evaluation.search.CHUNK", 4)
    scores, relevance, cut = one_at_a_time(checkpoint, folder)
    result = evaluate(checkpoint, retrieval=str(folder), batch_size=batch_size)
    expected = measures({query: ranked(row) for query, row in scores.items()}, relevance)
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert expected["recall_at_100"] == pytest.approx((1 + 1 / 2 + 1) / 3)  # without q2 for q2
    assert (result["queries"], result["documents"]) == (3, 10)
    assert result["queries_cut"] + result["documents_cut"] == cut > 1
    report = evaluation_report([result])
    assert f"{expected['ndcg_at_10']:.4f}" in report and "3 queries, 10 documents" in report
    assert f"{result['documents_cut']} documents are longer, and were cut" in report


def test_a_collection_is_parsed_once_for_all_checkpoints(checkpoint, folder, tmp_path, monkeypatch):
    parsed = []

    def recorded(file):
        parsed.append(file.name)
        return read_entries(file)

    monkeypatch.setattr(beir, "read_entries", recorded)
    given = ["--checkpoint", checkpoint, checkpoint, "--retrieval", folder, "--device", "cpu"]
    evaluate_main([*map(str, given), "--output", str(tmp_path / "report")])
    # The texts of the documents, which are not kept, are read again for each checkpoint.
    assert parsed == ["corpus.jsonl", "queries.jsonl", "corpus.jsonl", "corpus.jsonl"]
    os.utime(folder / "queries.jsonl", ns=(0, 0))  # written anew
    read_collection(folder, "test")
    assert parsed[4:] == ["corpus.jsonl", "queries.jsonl"]


def test_titles_come_before_texts_as_beir_joins_them(folder):
    """One has neither, the next one a text alone."""
    documents = list(read_collection(folder, "test").documents())
    assert documents[1] == "" and documents[2] in WORDS
    assert documents[3].startswith(f"{WORDS[2]} ") and documents[5] == documents[0]


def test_two_processes_find_what_one_does(checkpoint, folder, launch, tmp_path):
    one = evaluate(checkpoint, retrieval=str(folder), batch_size=3)
    asked = ["--checkpoint", checkpoint, "--retrieval", folder, "--batch-size", 3]
    asked += ["--device", "cpu", "--output", tmp_path / "report"]
    said = launch(*asked, program="eval", processes=2).succeed()
    assert said.count("evaluating on 2 x cpu\n") == 1
    (two,) = json.loads((tmp_path / "report/report.json").read_text())
    assert two.pop("device") == "2 x cpu" and one.pop("device") == "cpu"
    assert two == one


BROKEN = {  # the file, what is changed in it, and what is said
    "no corpus": ("corpus.jsonl", None, "corpus.jsonl is missing.*: a folder in BEIR's layout has"),
    "no queries": ("queries.jsonl", None, "queries.jsonl is missing"),
    "no split": ("qrels/test.tsv", None, "test.tsv is missing; --split is test, there are: dev"),
    "cut": ("corpus.jsonl", ('"}\n', ""), r'corpus.jsonl, line 1 is no object with an "_id"'),
    "a list": ("queries.jsonl", ("{", "[{"), r"queries.jsonl, line 1 is no .*Expecting"),
    "no text": ("queries.jsonl", ('"text"', '"txt"'), "line 1 is no .*it has no text"),
    "a number": ("corpus.jsonl", ('"d0"', "0"), "line 2 is no .*it._id = 0; allowed: text in quo"),
    "a surrogate": ("corpus.jsonl", ('"title": "', r'"title": "\ud800'), "line 2 is no .*surrogat"),
    "twice": ("corpus.jsonl", ('"d0"', '"d1"'), "corpus.jsonl, line 3 has the id 'd1' again"),
    "a query twice": ("queries.jsonl", ('"q1"', '"q2"'), "line 2 has the id 'q2' again"),
    "unknown": ("corpus.jsonl", ('"d3"', '"x"'), "test.tsv names 'd3', an id that .*corpus.jsonl"),
    "unknown query": ("queries.jsonl", ('"q3"', '"x"'), "names 'q3', an id that .*queries.jsonl"),
    "no head": ("qrels/test.tsv", ("query-id\tcorpus-id\tscore\n", ""), "line 1 is 'q1 d1 1'; all"),
    "spaces": ("qrels/test.tsv", ("q2\tq2\t1", "q2 q2 1"), "test.tsv, line 3 is 'q2 q2 1'; allowe"),
    "otherwise": (
        "qrels/test.tsv",
        ("q2\tq2\t1", "q1\td1\t0"),
        "line 3 judges 'd1' for 'q1' again",
    ),
    "huge": (
        "qrels/dev.tsv",
        ("\t1", "\t1" + 320 * "0"),
        "line 2 is .*whole number of at most six",
    ),
    "nan": (
        "qrels/dev.tsv",
        ("d4\t1", "d4\tnan"),
        "line 2 is 'q4 d4 nan'; allowed: .* at most six",
    ),
    "nothing": ("qrels/dev.tsv", ("q4\td4\t1", "q4\td4\t0"), "judges no document as relevant"),
    "empty": ("qrels/dev.tsv", ("q4\td4\t1\n", ""), "dev.tsv judges no document"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_is_no_collection_is_refused_in_a_line(checkpoint, folder, name):
    file, change, said = BROKEN[name]
    text = (folder / file).read_text()
    (folder / file).unlink()
    if change:
        (folder / file).write_text(text.replace(*change, 1))
    split = Path(file).stem if file.startswith("qrels") else "test"
    with pytest.raises(UserError, match=said) as raised:
        evaluate(checkpoint, retrieval=str(folder), split=split)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--text", "a"], "not allowed with"),
        (["--pairs", "a"], "not allowed with"),
        (["--stride", "2"], "--stride is given, which scoring retrieval does not read"),
        (["--split", "train"], "there are: dev, test"),
    ],
)
def test_options_that_retrieval_does_not_read_are_refused(checkpoint, folder, given, said, capsys):
    with pytest.raises((UserError, SystemExit)) as raised:
        evaluate_main(["--checkpoint", str(checkpoint), "--retrieval", str(folder), *given])
    assert said in f"{raised.value} {capsys.readouterr().err}"
