"""The report of an evaluation: a table, the conventions of each row, and a picture, from the
numbers of mixer.evaluation.evaluate.
"""

import json
import math
from pathlib import Path

import numpy as np

from mixer.checkpoints.pretrained import weights_sha256
from mixer.common.errors import UserError, first_line
from mixer.common.files import whole_directory
from mixer.reporting.curves import plot_loss_by_position
from mixer.reporting.tables import bullets, table

COLUMNS = {
    "checkpoint": "label",
    "tokens scored": "tokens_scored",
    "loss (nats/token)": "loss",
    "accuracy": "accuracy",
    "token ppl": "token_perplexity",
    "word ppl": "word_perplexity",
    "byte ppl": "byte_perplexity",
    "bits/byte": "bits_per_byte",
    "tokens/s": "tokens_per_second",
    "peak memory, GB": "peak_memory_gb",
}


PARTS = 8  # of a window, for each of which a table has the accuracy


def select(results: list[dict], columns: dict[str, str]) -> list[dict]:
    """Rows of a table: the columns' titles mapped to what the results have under their keys,
    without the columns that not all results have: tasks have no bytes, older reports no accuracy.
    """
    shared = {title: key for title, key in columns.items() if all(key in r for r in results)}
    return [{title: result[key] for title, key in shared.items()} for result in results]


def evaluation_report(results: list[dict]) -> str:
    """Markdown: one row a checkpoint, and under the table what it was measured by."""
    if "pairs" in results[0]:
        columns = {"checkpoint": "label", "pairs": "pairs", "tokens": "window"}
        columns |= {name.replace("_", " "): name for name in results[0] if name[:5] == "top1_"}
        return table(select(results, columns))
    notes = [evaluation_notes(*results)]
    if len({result["tokenizer_sha256"] for result in results}) > 1:
        note = "The tokenizers differ: compare bits/byte and the perplexities per byte and word, "
        notes.append(bullets([note + "not those per token."]))
    tables: dict[tuple, list[dict]] = {}
    for row in (by_part(result) for result in results if result.get("is_task")):
        tables.setdefault(tuple(row), []).append(row)  # of one task and window
    rows = select(results, COLUMNS)
    if longer_contexts(results):
        rows = [row | by_context(r) for row, r in zip(rows, results, strict=True)]
    return "\n\n".join([*map(table, [rows, *tables.values()]), "\n".join(notes)])


def longer_contexts(results: list[dict]) -> set[int]:
    """The contexts that models were trained with, where the windows are longer."""
    return {r["context"] for r in results if (r.get("context") or math.inf) < r["window"]}


def by_context(r: dict) -> dict[str, float | str]:
    """The loss up to the context that a model was trained with, and past it."""
    context = r.get("context") or r["window"]
    scored = list(zip(r["loss_by_position"], r["count_by_position"], strict=True))
    parts, found = {"to the context": scored[:context], "past it": scored[context:]}, {}
    for title, part in parts.items():
        count = sum(count for _, count in part)
        nats = sum(loss * count for loss, count in part if count)
        found[f"loss {title}"] = nats / count if count else "-"
    return found


def by_part(result: dict) -> dict:
    """A row of a table: the accuracy in each part of the window where there are answers."""
    row = {"accuracy by position": result["label"]}
    rights, counts = result["accuracy_by_position"], result["count_by_position"]
    for places in np.array_split(np.arange(len(counts)), PARTS):
        scored = [place for place in places if counts[place]]
        if scored:
            mean = np.average([rights[n] for n in scored], weights=[counts[n] for n in scored])
            row[f"{places[0]} to {places[-1]}"] = float(mean)
    return row


def evaluation_notes(*results: dict) -> str:
    """What a reader must know to compare the numbers: what holds for all results, then what each
    has of its own.
    """
    found = [conventions(result) for result in results]
    shared = [name for name in found[0] if len({of[name] for of in found}) == 1]
    notes = [f"{name}: {found[0][name]}" for name in shared]
    for result, of in zip(results, found, strict=True):
        own = [name for name in of if name not in shared]
        notes += [f"{result['label']}, {name}: {of[name]}" for name in own]
    return bullets(notes)


def conventions(r: dict) -> dict[str, str]:
    kind = "disjoint"
    if r["stride"] < r["window"]:
        least = r["window"] - r["stride"] + 1
        kind = f"after the first, each target sees at least {least:,} tokens"
    spare = r["vocabulary"] - r["tokenizer_ids"]
    padding = f", {spare} of them unused by the tokenizer" if spare > 0 else ""
    repeats, others = (
        "none" if r[key] is None else f"{r[key]:.4f}" for key in ("repeats_loss", "others_loss")
    )
    causality = r["causality"]
    sizes = f"; {r['bytes']:,} bytes and {r['words']:,} words (UTF-8, split at white space, "
    sizes += f"counted from {r['sizes_counted_from']}, unscored first tokens included)"
    return {
        "text": r["text"] + sizes * (not r.get("is_task")),
        "model": f"{r['architecture']}, {r['parameters']:,} parameters, vocabulary "
        f"{r['vocabulary']:,}{padding}",
        "streams": f"{r['streams']:,}, first token of each {r['first_token']}; "
        f"{r['eos_scored']:,} EOS among the scored tokens",
        "windows": f"{r['windows']:,} of at most {r['window']:,} tokens, stride {r['stride']:,} "
        f"({kind}), the last of a stream {r['last_window']}",
        "computed": f"backend {r['backend']}, {r['dtype']}, {r['device']}; memory {r['memory']}",
        "repeats": f"{r['repeats_share']:.1%} of the scored tokens complete three tokens that "
        f"occurred in the window already; their loss is {repeats}, that of all others {others}",
        "causality": f"in a window of {causality['window']:,}, with all tokens changed from some "
        f"place on, logits before it moved by {causality['largest_move_before']:.2g} at most, "
        f"those after it by {causality['smallest_move_after']:.2g} at least",
    }


def well_counted(losses: list, counts: list[int]) -> list:
    """The losses, with None at positions that few windows score: with a stride below the window,
    only the first window scores the early ones.
    """
    return [
        loss if 10 * count >= max(counts) else None
        for loss, count in zip(losses, counts, strict=True)
    ]


def tell_apart(results: list[dict]) -> list[dict]:
    """The results, numbered in their order where two checkpoints have the same label, as those of
    two runs of one name.
    """
    paths = {Path(result["checkpoint"]).resolve() for result in results}
    if len({result["label"] for result in results}) == len(paths):
        return results
    return [r | {"label": f"{number}: {r['label']}"} for number, r in enumerate(results, 1)]


def evaluations_of(checkpoint: Path) -> list[dict]:
    """The results for exactly these weights in all reports beside the checkpoint (eval-*).

    Raises UserError for a report that cannot be read, or lacks what reports say of a result.
    """
    weights, found = weights_sha256(checkpoint), []
    for file in sorted(checkpoint.resolve().parent.glob("eval-*/report.json")):
        try:
            results = json.loads(file.read_text(encoding="utf-8"))
            for result in results:
                if result.get("weights_sha256") == weights:
                    # Earlier versions have the local paths of the text under "text".
                    found.append(result | {"text": result.get("public_text", result["text"])})
                    evaluation_report(found[-1:])  # reads all that a card needs
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{file} is not what this version's eval.py writes ({first_line(error)}): evaluate "
                "again in the same way, or delete it"
            ) from None
    return found


def write_evaluation(results: list[dict], directory: Path) -> None:
    """report.json, report.md and loss_by_position.png in `directory`."""
    curves = {
        r["label"]: well_counted(r["loss_by_position"], r["count_by_position"])
        for r in results
        if "pairs" not in r
    }
    picture = "\n![Loss by position](loss_by_position.png)\n" if curves else ""
    text = f"# Evaluation\n\n{evaluation_report(results)}\n{picture}"
    with whole_directory(directory) as stage:
        (stage / "report.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        (stage / "report.md").write_text(text, encoding="utf-8")
        if curves:
            picture = stage / "loss_by_position.png"
            plot_loss_by_position(curves, picture, longer_contexts(results))
