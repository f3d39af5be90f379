"""Pairs of texts to train retrieval on, from a collection in BEIR's layout.

    python benchmarks/beir_pairs.py FOLDER --output PAIRS.jsonl [--split train]

Each document gives pairs of its title and its text, and of each of its sentences and all of it.
With --split, also of each query of this split and a document that is relevant for it. The pairs of
a document follow each other, so that data.validation_documents holds out documents. Train with

    data.source=jsonl data.path=PAIRS.jsonl data.text_field=query data.pair_field=document
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mixer.common.errors import run_command
from mixer.common.files import as_path, whole_file
from mixer.evaluation.beir import Entry, read_collection, read_entries

END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
LEAST_WORDS = 5  # of a sentence: shorter ones, such as "Methods.", are in many documents


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, help="corpus.jsonl, queries.jsonl and qrels")
    parser.add_argument("--output", type=Path, required=True, help="file for the pairs")
    parser.add_argument("--split", default="", help="of the qrels; default: the corpus alone")
    options = parser.parse_args()
    folder = as_path(options.folder)
    queries = queries_of_documents(folder, options.split) if options.split else {}
    pairs = (
        {"query": query, "document": document}
        for entry in read_entries(folder / "corpus.jsonl")
        for query, document in pairs_of(entry, queries.get(entry.id, []))
    )
    print(f"{write_rows(as_path(options.output), pairs):,} pairs are in {options.output}")


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> int:
    """Writes a .jsonl, and returns the number of its lines."""
    count = 0
    with whole_file(path) as stage, open(stage, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def queries_of_documents(folder: Path, split: str) -> dict[str, list[str]]:
    """By document, the queries of a split that it is relevant for."""
    collection = read_collection(folder, split)
    queries: dict[str, list[str]] = {}
    for query, grades in collection.relevance.items():
        for document, grade in grades.items():
            if grade > 0:
                queries.setdefault(document, []).append(collection.queries[query])
    return queries


def pairs_of(entry: Entry, queries: list[str]) -> Iterator[tuple[str, str]]:
    """The pairs of a document, (query, document) each.

    A sentence is not cut out of its document: so all its pairs but the first have the same second
    text, and training knows that these are no negatives of each other.
    """
    if entry.title.strip() and entry.text.strip():
        yield entry.title, entry.text
    sentences = END_OF_SENTENCE.split(entry.text)
    for query in [*queries, *sentences]:
        if query in queries or len(query.split()) >= LEAST_WORDS:
            yield query, entry.joined()


if __name__ == "__main__":
    run_command(main)
