"""What BM25 finds of a collection in BEIR's layout: the row that models are compared with.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/bm25.py FOLDER --output PATH [--split test] [--identifiers]

Documents and queries are words without English stop words, stemmed (Snowball), and scored as Lucene
does, with the defaults of bm25s. With --identifiers, names of code such as read_csv and readCsv are
two words each. A document without a word of the query is not found. Writes PATH.json and PATH.md.
"""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from saving import markdown, measured_by, origin, parser_of, save

from mixer.common.errors import UserError, run_command
from mixer.common.files import as_path
from mixer.evaluation.beir import Collection, measures, ranked, read_collection

# Of an identifier: capitals, a capitalized or small word, a word with other letters, a number.
PART = re.compile(r"[A-Z]+(?![^\W\d_A-Z])|[A-Z]?[^\W\d_A-Z]+|\d+")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="corpus.jsonl, queries.jsonl and qrels")
    parser.add_argument("--split", default="test", help="of the qrels")
    parser.add_argument("--identifiers", action="store_true", help="split names into their words")
    options = parser.parse_args()
    if not (find_spec("bm25s") and find_spec("Stemmer")):
        remedy = "pip install -c constraints.txt -e '.[bench]'"
        raise UserError(f"bm25s or PyStemmer is not installed: {remedy}")
    folder = as_path(options.folder)
    collection = read_collection(folder, options.split)
    result = measured_by(options, device="cpu") | {
        "collection": f"{folder.resolve().name} {options.split}",
        "bm25s": version("bm25s"),
        "queries": len(collection.queries),
        "documents": len(collection.document_ids),
    }
    result |= measures(rankings_of(collection, options.identifiers), collection.relevance)
    text = table(result)
    save(result, text, options.output)
    print(text)


def rankings_of(collection: Collection, identifiers: bool = False) -> dict[str, list[str]]:
    """By query, the ids of the documents with the highest scores, the best first. identifiers:
    whether to split names into their words.
    """
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")

    def words_of(texts: list[str]) -> list[list[str]]:
        if identifiers:
            texts = [" ".join(PART.findall(text)) for text in texts]
        return bm25s.tokenize(
            texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False
        )

    index = bm25s.BM25()
    index.index(words_of(list(collection.documents())), show_progress=False)
    rankings = {}
    for query, words in zip(
        collection.queries, words_of(list(collection.queries.values())), strict=True
    ):
        # bm25s takes no query without words.
        scores = index.get_scores(words).tolist() if words else [0.0] * len(collection.document_ids)
        by_document = zip(collection.document_ids, scores, strict=True)
        # As in BEIR, without the document with the query's own id.
        rankings[query] = ranked({name: s for name, s in by_document if s > 0 and name != query})
    return rankings


def table(result: dict) -> str:
    head = ["model", "queries", "documents", "nDCG@10", "recall@100", "MRR@10"]
    row = ["BM25", f"{result['queries']:,}", f"{result['documents']:,}"]
    row += [f"{result[name]:.4f}" for name in ("ndcg_at_10", "recall_at_100", "mrr_at_10")]
    title = f"# BM25 on {result['collection']}"
    return f"{title}\n\n{markdown(head, [row])}\n\nbm25s {result['bm25s']}. {origin(result)}.\n"


if __name__ == "__main__":
    run_command(main)
