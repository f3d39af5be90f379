"""Collections in BEIR's layout (arXiv 2104.08663): documents, queries, and which documents answer
which queries; and how good rankings of the documents are. Importing this file takes no time.

    corpus.jsonl       {"_id": "d1", "title": "A title, or none", "text": "A document."}
    queries.jsonl      {"_id": "q1", "text": "A query."}
    qrels/SPLIT.tsv    query-id, corpus-id and score, between tabs: the relevance, a whole number of
                       at most six digits; 0 and below: judged as not relevant
"""

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mixer.common.errors import UserError, first_line
from mixer.common.values import shape_problem

LAYOUT = "a folder in BEIR's layout has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv"
ROW_SHAPE = {"_id": str, "title": str | None, "text": str, str: object}
SCORE = re.compile(r"-?\d{1,6}")
LENGTH = 100  # of a ranking: no measure looks further
# By query, the grade of each document that was judged: above 0 it is relevant.
Relevance = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Entry:
    """A document or a query."""

    id: str
    title: str  # "" if it has none
    text: str

    def joined(self) -> str:
        """The text with the title before it, as BEIR joins them."""
        return f"{self.title} {self.text}".strip()


@dataclass(frozen=True)
class Collection:
    corpus: Path
    document_ids: list[str]  # in the order of the corpus
    queries: dict[str, str]  # the texts of the split's queries, by id
    relevance: Relevance

    def documents(self) -> Iterator[str]:
        """The documents in the order of the corpus, each with its title before it."""
        return (entry.joined() for entry in read_entries(self.corpus))


def read_collection(folder: Path, split: str) -> Collection:
    """Reads all of a folder, and keeps everything but the documents. Raises UserError for a file
    that is missing, a line that is none of its file, an id that comes twice, and judgements of
    what is not there.
    """
    corpus = folder / "corpus.jsonl"
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {problem}: {LAYOUT}")
    queries = folder / "queries.jsonl"
    qrels = folder / "qrels" / f"{split}.tsv"
    for file in (corpus, queries, qrels):
        if not file.is_file():
            splits = sorted(path.stem for path in qrels.parent.glob("*.tsv"))
            splits_there = f"; --split is {split}, there are: {', '.join(splits)}" if splits else ""
            raise UserError(f"{file} is missing{splits_there}: {LAYOUT}")
    times = tuple(file.stat().st_mtime_ns for file in (corpus, queries, qrels))
    return _parsed(corpus, queries, qrels, times)


@lru_cache(maxsize=1)  # it is checked before a model is loaded, and then read for each checkpoint
def _parsed(corpus: Path, queries: Path, qrels: Path, times: tuple[int, ...]) -> Collection:
    """times: when the files were written, with which they are parsed anew."""
    relevance = _read_relevance(qrels)
    document_ids = [entry.id for entry in read_entries(corpus)]
    texts_of_queries = {entry.id: entry.joined() for entry in read_entries(queries)}
    judged = {document for grades in relevance.values() for document in grades}
    for file, unknown in (
        (queries, relevance.keys() - texts_of_queries),
        (corpus, judged.difference(document_ids)),
    ):
        if unknown:
            problem = f"{qrels} names {min(unknown)!r}, an id that {file} does not have"
            raise UserError(f"{problem}: copy both again, or give another --split")
    of_split = {query: texts_of_queries[query] for query in relevance}
    return Collection(corpus, document_ids, of_split, relevance)


def read_entries(file: Path) -> Iterator[Entry]:
    """What the lines of a .jsonl hold. Raises UserError for a line that is none, and for an id that
    comes twice.
    """
    ids: set[str] = set()
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            entry = _entry(line, f"{file}, line {number}")
            if entry.id in ids:
                problem = f"{file}, line {number} has the id {entry.id!r} again"
                raise UserError(f"{problem}: remove one of the two lines")
            ids.add(entry.id)
            yield entry


def _entry(line: bytes, location: str) -> Entry:
    try:
        row = json.loads(line)
        problem = shape_problem(row, ROW_SHAPE, "it")
        missing = [key for key in ("_id", "text") if key not in row] if not problem else []
        if missing:
            problem = f"it has no {missing[0]}"
        if not problem:
            entry = Entry(row["_id"], row.get("title") or "", row["text"])
            # Half of a surrogate pair, which JSON can spell, is no text.
            f"{entry.id} {entry.joined()}".encode()
            return entry
    except (ValueError, RecursionError) as error:
        problem = first_line(error)
    raise UserError(
        f'{location} is no object with an "_id" and a "text" ({problem}): correct it, or copy the '
        "file again if it is cut short"
    )


def _read_relevance(file: Path) -> Relevance:
    """By query, in the file's order; as in BEIR the first line has the names of the columns."""
    relevance: Relevance = {}
    with open(file, encoding="utf-8", newline="") as lines:
        rows = csv.reader(lines, delimiter="\t")
        try:
            for row in filter(None, rows):
                is_head = rows.line_num == 1
                is_judgement = len(row) == 3 and SCORE.fullmatch(row[2].strip()) is not None
                if is_judgement == is_head:
                    raise UserError(
                        f"{file}, line {rows.line_num} is {' '.join(row)!r:.60}; allowed: first "
                        "query-id, corpus-id, score, then such as q1, d1, 1, between tabs; a score "
                        "is a whole number of at most six digits"
                    )
                if is_judgement:
                    query, document, score = row
                    grades = relevance.setdefault(query, {})
                    if grades.setdefault(document, int(score)) != int(score):
                        problem = f"{file}, line {rows.line_num} judges {document!r} for {query!r}"
                        raise UserError(f"{problem} again, otherwise: remove one of the two lines")
        except (ValueError, csv.Error) as error:
            raise UserError(f"{file} is no text in UTF-8 with tabs ({first_line(error)})") from None
    if not any(grade > 0 for grades in relevance.values() for grade in grades.values()):
        raise UserError(f"{file} judges no document as relevant: give another --split")
    return relevance


def measures(rankings: dict[str, list[str]], relevance: Relevance) -> dict[str, float]:
    """Means over all queries that were judged, as BEIR computes them with trec_eval:

    - nDCG@10: the sum of grade / log2(1 + rank) over the first ten, divided by the largest that any
      ranking has.
    - recall@100: the share of the relevant documents that are among the first hundred.
    - MRR@10: 1 / rank of the first relevant document, 0 if it is not among the first ten.

    A query without a relevant document has 0 of each. rankings: by query, ids of documents, the
    best first.
    """
    totals = {"ndcg_at_10": 0.0, "recall_at_100": 0.0, "mrr_at_10": 0.0}
    for query, grades in relevance.items():
        gains = [max(0, grades.get(document, 0)) for document in rankings[query]]
        best = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
        if not best:
            continue
        first = next((rank for rank, gain in enumerate(gains[:10], 1) if gain), math.inf)
        totals["ndcg_at_10"] += _discounted(gains[:10]) / _discounted(best[:10])
        totals["recall_at_100"] += sum(gain > 0 for gain in gains[:100]) / len(best)
        totals["mrr_at_10"] += 1 / first
    return {name: total / len(relevance) for name, total in totals.items()}


def _discounted(gains: list[int]) -> float:
    return sum(gain / math.log2(1 + rank) for rank, gain in enumerate(gains, 1))


def ranked(scores: dict[str, float]) -> list[str]:
    """The documents with the highest scores, the best first. As in trec_eval, the larger id in the
    order of text comes first where scores are equal.
    """
    return sorted(scores, key=lambda document: (scores[document], document), reverse=True)[:LENGTH]
