"""The report of an evaluation: a table, the conventions of each row, and a picture."""

import json
from pathlib import Path

from mixer.common.files import whole_directory
from mixer.reporting.figure import can_draw, plot_loss_by_position
from mixer.reporting.tables import table, wrapped

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
    "loss to the context": "loss_to_context",
    "loss past it": "loss_past_context",
    "pairs": "pairs",
    "tokens": "tokens",
    "top1 of 32": "top1_of_32",
    "top1 of 1024": "top1_of_1024",
    "top1 of 8192": "top1_of_8192",
}


def evaluation_report(results: list[dict]) -> str:
    """Markdown: one row a checkpoint, and under the table what it was measured by."""
    known = {title: key for title, key in COLUMNS.items() if any(key in r for r in results)}
    rows = table([{title: r.get(key, "-") for title, key in known.items()} for r in results])
    if "pairs" in results[0]:
        return rows
    notes, found = [], [conventions(result) for result in results]
    for name in found[0]:  # what holds for all results is said once
        if len({own[name] for own in found}) == 1:
            notes.append(f"{name}: {found[0][name]}")
        else:
            named = zip(results, found, strict=True)
            notes += [f"{name}, {result['label']}: {own[name]}" for result, own in named]
    if len({result["tokenizer_sha256"] for result in results}) > 1:
        note = "The tokenizers differ: compare bits/byte and the perplexities per byte and word, "
        notes.append(note + "not those per token.")
    return "\n".join([rows, "", *(wrapped(note, "- ", "  ") for note in notes)])


def conventions(r: dict) -> dict[str, str]:
    """What a reader must know of a result to compare its numbers."""
    sizes = f"{r['bytes']:,} bytes and {r['words']:,} words (UTF-8, split at white space)"
    has_bytes = [sizes] if "bits_per_byte" in r else []
    return {
        "text": "; ".join(filter(None, [r["text"], *has_bytes, r["tokenizer_loses"]])),
        "model": f"{r['architecture']}, {r['parameters']:,} parameters, vocabulary "
        f"{r['vocabulary']:,}",
        "streams": f"{r['streams']:,}, first token of each {r['first_token']}",
        "windows": f"at most {r['window']:,} tokens, stride {r['stride']:,}, "
        f"the last of a stream {r['last_window']}",
        "computed": f"backend {r['backend']}, {r['dtype']}, {r['device']}",
    }


def write_evaluation(results: list[dict], directory: Path) -> None:
    """report.json, report.md and loss_by_position.png in `directory`."""
    curves, contexts = [], set()
    for r in results if can_draw() and "pairs" not in results[0] else ():
        # With a stride below the window, only a stream's first window scores the early positions.
        losses, counts = r["loss_by_position"], r["count_by_position"]
        known = zip(losses, counts, strict=True)
        curves.append((r["label"], [x if 10 * n >= max(counts) else None for x, n in known]))
        contexts |= {r["context"]} if "loss_to_context" in r else set()
    picture = "\n![Loss by position](loss_by_position.png)\n" if curves else ""
    text = f"# Evaluation\n\n{evaluation_report(results)}\n{picture}"
    with whole_directory(directory) as stage:
        (stage / "report.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        (stage / "report.md").write_text(text, encoding="utf-8")
        if curves:
            plot_loss_by_position(curves, stage / "loss_by_position.png", contexts)
