"""What models find of a collection in BEIR's layout, beside BM25.

    python benchmarks/retrieval.py RESULTS.json EVALUATION.json BM25.json --output PATH

RESULTS.json has the runs of benchmarks/plans/scifact.yaml or functions.yaml, EVALUATION.json what
`eval.py --retrieval` says of their checkpoints, and BM25.json what benchmarks/bm25.py does. Writes
PATH.md: of each kind the mean over the seeds at its best rate, which is that of the lowest loss on
pairs that training has not read.
"""

import json
from pathlib import Path
from statistics import fmean

from saving import file_of, markdown, parser_of
from verdict import seed_names

from mixer.common.errors import UserError, first_line, run_command
from mixer.common.files import as_path, read_json, write_text
from mixer.common.terminal import counted
from mixer.comparison.plan import Run
from mixer.reporting.text import SECONDS

SAME = ("collection", "queries", "documents")
REMEDY = "name the files of one plan"
MEASURES = {"nDCG@10": "ndcg_at_10", "recall@100": "recall_at_100", "MRR@10": "mrr_at_10"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, help="JSON file of a plan")
    parser.add_argument("evaluation", type=Path, help="report.json of eval.py --retrieval")
    parser.add_argument("bm25", type=Path, help="JSON file of bm25.py")
    options = parser.parse_args()
    results = read_json(as_path(options.results), REMEDY, {"runs": {str: dict}, "plan": dict})
    shapes = {"collection": str, "queries": int, "documents": int}
    bm25 = read_json(
        as_path(options.bm25), REMEDY, shapes | dict.fromkeys(MEASURES.values(), float)
    )
    text = table(results, read_rows(as_path(options.evaluation)), bm25)
    files = options.results.name, options.evaluation.name, options.bm25.name
    listed = ", ".join(f"[{name}]({name})" for name in files)
    text += f"\n\nFrom {listed}, which have hardware and commits.\n"
    write_text(file_of(options.output, ".md"), text)
    print(text)


def read_rows(file: Path) -> list[dict]:
    """One for each checkpoint."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}): {REMEDY}") from None


def table(results: dict, evaluation: list[dict], bm25: dict) -> str:
    """Everything as Markdown. Raises UserError where the files do not belong together."""
    collection = bm25["collection"]
    for row in evaluation:
        if differing := [key for key in SAME if row.get(key) != bm25[key]]:
            key = differing[0]
            problem = f"BM25 has {key} {bm25[key]}, {row['checkpoint']} {row.get(key)}"
            raise UserError(f"{problem}: both must be of one collection")
    rows = [["BM25", *(f"{bm25[name]:.4f}" for name in MEASURES.values()), "-", "-", "-", "-"]]
    of_kinds = [row_of(name, results, evaluation) for name in results["plan"]["kinds"]]
    rows += sorted(of_kinds, key=lambda row: row[1], reverse=True)
    head = ["model", *MEASURES, "nDCG@10 by seed", "parameters, M", "seconds of pairs", "pairs, M"]
    return f"# What is found of {collection}\n\n{markdown(head, rows)}"


def row_of(kind_name: str, results: dict, evaluation: list[dict]) -> list[str]:
    names = seed_names(kind_name, results["runs"])
    if not names:
        raise UserError(f"no longer run of {kind_name!r} has a loss: let the plan end first")
    seeds = [results["runs"][name] for name in names]
    evaluations = [evaluated(name, evaluation) for name in names]
    means = [f"{fmean(row[measure] for row in evaluations):.4f}" for measure in MEASURES.values()]
    by_seed = ", ".join(f"{row['ndcg_at_10']:.4f}" for row in evaluations)
    pairs = seeds[0]["steps"] * seeds[0]["settings"]["train.batch_size"]
    return [
        kind_name,
        *means,
        by_seed,
        f"{seeds[0]['parameters'] / 1e6:.1f}",
        f"{fmean(row['training_seconds'] for row in seeds):{SECONDS}}",
        f"{pairs / 1e6:.3f}",
    ]


def evaluated(name: str, evaluation: list[dict]) -> dict:
    """What was found by the checkpoint of a run."""
    folder = Run(name, {}).folder
    rows = [row for row in evaluation if Path(row["checkpoint"]).parent.name == folder]
    if len(rows) != 1:
        number = counted(len(rows), "checkpoint")
        raise UserError(f"the evaluation has {number} of {name!r}: evaluate its last one alone")
    return rows[0]


if __name__ == "__main__":
    run_command(main)
