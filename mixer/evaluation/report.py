"""The report of an evaluation: a table, the conventions of each row, and a picture, from the
numbers of mixer.evaluation.evaluate.
"""

import json
import math
from pathlib import Path

from mixer.common.files import whole_directory
from mixer.reporting.curves import plot_loss_by_position
from mixer.reporting.figure import can_draw
from mixer.reporting.tables import bullets, table

COLUMNS = {
    "checkpoint": "label",
    "tokens scored": "tokens_scored",
    "loss (nats/token)": "loss",
    "token ppl": "token_perplexity",
    "word ppl": "word_perplexity",
    "byte ppl": "byte_perplexity",
    "bits/byte": "bits_per_byte",
    "accuracy": "accuracy",
    "tokens/s": "tokens_per_second",
    "peak memory, GB": "peak_memory_gb",
}


def evaluation_report(results: list[dict]) -> str:
    """Markdown: one row a checkpoint, and under the table what it was measured by."""
    columns, is_pairs = COLUMNS, "pairs" in results[0]
    if is_pairs:
        columns = {"checkpoint": "label", "pairs": "pairs", "tokens": "window"}
        columns |= {name.replace("_", " "): name for name in results[0] if name[:5] == "top1_"}
    # Not all results have all columns: tasks have no bytes.
    shared = [title for title, key in columns.items() if all(key in r for r in results)]
    rows = [{title: result[columns[title]] for title in shared} for result in results]
    if is_pairs:
        return table(rows)
    if longer_contexts(results):
        rows = [row | by_context(r) for row, r in zip(rows, results, strict=True)]
    notes = evaluation_notes(results)
    if len({result["tokenizer_sha256"] for result in results}) > 1:
        note = "The tokenizers differ: compare bits/byte and the perplexities per byte and word, "
        notes.append(note + "not those per token.")
    return f"{table(rows)}\n\n{bullets(notes)}"


def longer_contexts(results: list[dict]) -> set[int]:
    """The contexts that models were trained with, where the windows are longer."""
    return {r["context"] for r in results if (r["context"] or math.inf) < r["window"]}


def by_context(r: dict) -> dict[str, float | str]:
    """The loss up to the context that a model was trained with, and past it."""
    context = r["context"] or r["window"]
    scored = list(zip(r["loss_by_position"], r["count_by_position"], strict=True))
    parts, found = {"to the context": scored[:context], "past it": scored[context:]}, {}
    for title, part in parts.items():
        count = sum(count for _, count in part)
        nats = sum(loss * count for loss, count in part if count)
        found[f"loss {title}"] = nats / count if count else "-"
    return found


def evaluation_notes(results: list[dict]) -> list[str]:
    """What a reader must know to compare the numbers: what holds for all results, then what each
    has of its own.
    """
    found = [conventions(result) for result in results]
    shared = [name for name in found[0] if len({of[name] for of in found}) == 1]
    notes = [f"{name}: {found[0][name]}" for name in shared]
    for result, of in zip(results, found, strict=True):
        notes += [f"{result['label']}, {name}: {of[name]}" for name in of if name not in shared]
    return notes


def conventions(r: dict) -> dict[str, str]:
    repeats, others = (
        "none" if r[key] is None else f"{r[key]:.4f}" for key in ("repeats_loss", "others_loss")
    )
    sizes = f"{r['bytes']:,} bytes and {r['words']:,} words (UTF-8, split at white space)"
    has_bytes = [sizes] if "bits_per_byte" in r else []
    return {
        "text": "; ".join(filter(None, [r["text"], *has_bytes, r["tokenizer_loses"]])),
        "model": f"{r['architecture']}, {r['parameters']:,} parameters, vocabulary "
        f"{r['vocabulary']:,}",
        "streams": f"{r['streams']:,}, first token of each {r['first_token']}",
        "windows": f"{r['windows']:,} of at most {r['window']:,} tokens, stride {r['stride']:,}, "
        f"the last of a stream {r['last_window']}",
        "computed": f"backend {r['backend']}, {r['dtype']}, {r['device']}",
        "repeats": f"{r['repeats_share']:.1%} of the scored tokens complete three tokens that "
        f"occurred in the window already; their loss is {repeats}, that of all others {others}",
    }


def write_evaluation(results: list[dict], directory: Path) -> None:
    """report.json, report.md and loss_by_position.png in `directory`."""
    curves = []
    for r in results if can_draw() and "pairs" not in results[0] else ():
        # With a stride below the window, only a stream's first window scores the early positions.
        losses, counts = r["loss_by_position"], r["count_by_position"]
        known = zip(losses, counts, strict=True)
        curves.append((r["label"], [x if 10 * n >= max(counts) else None for x, n in known]))
    picture = "\n![Loss by position](loss_by_position.png)\n" if curves else ""
    text = f"# Evaluation\n\n{evaluation_report(results)}\n{picture}"
    with whole_directory(directory) as stage:
        (stage / "report.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        (stage / "report.md").write_text(text, encoding="utf-8")
        if curves:
            picture = stage / "loss_by_position.png"
            plot_loss_by_position(curves, picture, longer_contexts(results))
