"""Pairs of texts to train retrieval on, from a collection in BEIR's layout.

    python benchmarks/beir_pairs.py FOLDER --output PAIRS.jsonl [--split train]

Each document gives pairs of its title and its text, and of each of its sentences and all of it.
With --split, also of each query of this split and a document that is relevant for it. The pairs of
each DOCUMENTS documents take turns: texts of a few pairs in a row would repeat a document, and a
language model would learn to copy. How many pairs the first ones have is printed: as
data.validation_documents it holds out documents. Train with

    data.source=jsonl data.path=PAIRS.jsonl data.text_field=query data.pair_field=document
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.files import as_path, whole_file
from mixer.evaluation.beir import LAYOUT, Entry, read_collection, read_entries

Pair = tuple[str, str]  # query and document
END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
DOCUMENTS = 200
LEAST_WORDS = 5  # of a sentence: shorter ones, such as "Methods.", are in many documents


def main() -> None:
    parser = command_parser("beir_pairs.py", __doc__)
    parser.add_argument("folder", type=Path, help="corpus.jsonl, queries.jsonl and qrels")
    parser.add_argument("--output", type=Path, required=True, help="file for the pairs")
    parser.add_argument("--split", default="", help="of the qrels; default: the corpus alone")
    options = parser.parse_args()
    folder = as_path(options.folder)
    if not (folder / "corpus.jsonl").is_file():
        raise UserError(f"{folder / 'corpus.jsonl'} is missing: {LAYOUT}")
    queries = queries_of_documents(folder, options.split) if options.split else {}
    entries = read_entries(folder / "corpus.jsonl")
    groups = in_turns(list(pairs_of(entry, queries.get(entry.id, []))) for entry in entries)
    first_group = next(groups, [])
    pairs = itertools.chain(first_group, itertools.chain.from_iterable(groups))
    rows = ({"query": query, "document": document} for query, document in pairs)
    count = write_rows(as_path(options.output), rows)
    of_first = f"those of the first {DOCUMENTS} documents in its first {len(first_group):,} lines"
    print(f"{count:,} pairs are in {options.output}, {of_first}")


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


def in_turns(pairs_of_documents: Iterable[list[Pair]]) -> Iterator[list[Pair]]:
    """The pairs of each DOCUMENTS documents: the first one of each, then the second ones."""
    documents = iter(pairs_of_documents)
    while group := list(itertools.islice(documents, DOCUMENTS)):
        rounds = itertools.zip_longest(*group)
        yield [pair for pairs in rounds for pair in pairs if pair is not None]


def pairs_of(entry: Entry, queries: list[str]) -> Iterator[Pair]:
    """The pairs of a document.

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
