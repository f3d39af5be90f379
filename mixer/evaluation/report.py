"""The report of an evaluation: a table, the conventions of each row, and a picture, from the
numbers of mixer.evaluation.evaluate.
"""

import json
from pathlib import Path

from mixer.checkpoints.pretrained import weights_sha256
from mixer.common.errors import UserError
from mixer.common.files import whole_directory
from mixer.reporting.curves import plot_loss_by_position
from mixer.reporting.tables import table

COLUMNS = {
    "checkpoint": "label",
    "tokens scored": "tokens_scored",
    "loss (nats/token)": "loss",
    "token ppl": "token_perplexity",
    "word ppl": "word_perplexity",
    "byte ppl": "byte_perplexity",
    "bits/byte": "bits_per_byte",
    "window": "window",
    "stride": "stride",
    "first token": "first_token",
    "last window": "last_window",
    "tokens/s": "tokens_per_second",
    "peak memory, GB": "peak_memory_gb",
}
# What an evaluation was asked for. A report with the same answers here may be replaced.
ASKED = (
    *("weights_sha256", "text", "tokens_sha256", "tokens_scored", "window", "stride"),
    *("first_token", "last_window", "backend", "dtype", "device"),
)
BACKEND_COLUMNS = {
    "backend": "backend",
    "loss (nats/token)": "loss",
    "difference": "difference",
    "largest difference at a position": "position_difference",
    "tokens/s": "tokens_per_second",
    "peak memory, GB": "peak_memory_gb",
}


def select(result: dict, columns: dict[str, str]) -> dict:
    """A row of a table: the columns' titles mapped to what `result` has under their keys."""
    return {title: result[key] for title, key in columns.items()}


def evaluation_report(results: list[dict]) -> str:
    """Markdown: one row a checkpoint; the conventions stand in the row and under the table."""
    notes = [evaluation_notes(result) for result in results]
    if len({result["tokenizer_sha256"] for result in results}) > 1:
        notes.append(
            "- The tokenizers differ: compare bits/byte and the perplexities per byte and word, "
            "not those per token."
        )
    parts = [table([select(result, COLUMNS) for result in results]), "\n".join(notes)]
    parts += [backends_report(result) for result in results if result["backends"]]
    return "\n\n".join(parts)


def kinds_note(r: dict) -> str:
    """The losses of tokens that the window itself would tell, and of the others."""
    losses = (
        "none" if r[key] is None else f"{r[key]:.4f}" for key in ("repeats_loss", "others_loss")
    )
    return (
        "Of the scored tokens {:.1%} complete three tokens that stand in the window already; their "
        "loss is {}, that of all others {}."
    ).format(r["repeats_share"], *losses)


def evaluation_notes(r: dict) -> str:
    """One line with everything that a reader must know to compare the numbers of a result."""
    kind = "disjoint"
    if r["stride"] < r["window"]:
        least = r["window"] - r["stride"] + 1
        kind = f"after the first, each target sees at least {least:,} tokens"
    spare = r["vocabulary"] - r["tokenizer_ids"]
    padding = f", {spare} of them unused by the tokenizer" if spare > 0 else ""
    return (
        f"- {r['label']}: {r['architecture']}, {r['parameters']:,} parameters, "
        f"vocabulary {r['vocabulary']:,}{padding}; "
        f"{r['text']}, {r['bytes']:,} bytes and {r['words']:,} words (UTF-8, split at white space, "
        f"counted from {r['sizes_counted_from']}, unscored first tokens included); "
        f"{r['streams']:,} stream(s), first token of each {r['first_token']}; "
        f"{r['eos_scored']:,} EOS among the scored tokens; "
        f"{r['windows']:,} windows of at most {r['window']:,}, stride {r['stride']:,} ({kind}), "
        f"the last of a stream {r['last_window']}; "
        f"backend {r['backend']}, {r['dtype']}, {r['device']}; memory {r['memory']}. "
        f"{kinds_note(r)} {causality_note(r['causality'])}"
    )


def causality_note(c: dict) -> str:
    places = ", ".join(map(str, c["changed_from"]))
    return (
        f"Causal: in a window of {c['window']:,}, with all tokens changed from place {places} on, "
        f"logits before that place moved by {c['largest_move_before']:.2g} at most, "
        f"those after by {c['smallest_move_after']:.2g} at least."
    )


def backends_report(result: dict) -> str:
    """The table of one checkpoint and text through each backend. Backends that cannot run here are
    listed below it with the reason.
    """
    ran = [row for row in result["backends"] if "problem" not in row]
    lines = [
        f"{result['label']} through each mixing backend "
        "(differences in nats per token, to the first row's):",
        "",
    ]
    # On a CPU only the peak of the whole process is known, which includes earlier backends.
    columns = {
        title: key
        for title, key in BACKEND_COLUMNS.items()
        if key != "peak_memory_gb" or "cpu" not in result["device"]
    }
    lines += [table([select(row, columns) for row in ran]), ""] if ran else []
    lines += [
        f"- {row['backend']}: {row['problem']}" for row in result["backends"] if "problem" in row
    ]
    return "\n".join(lines).rstrip()


def well_counted(losses: list, counts: list[int]) -> list:
    """The losses, with None at positions that few windows score: with a stride below the window,
    only the first window scores the early ones.
    """
    return [
        loss if 10 * count >= max(counts) else None
        for loss, count in zip(losses, counts, strict=True)
    ]


def tell_apart(results: list[dict]) -> list[dict]:
    """The results, with a checkpoint's path as its label where two checkpoints have the same label,
    as those of two runs of one name.
    """
    places = {(result["label"], result["checkpoint"]) for result in results}
    labels = [label for label, _ in places]
    return [r | {"label": r["checkpoint"]} if labels.count(r["label"]) > 1 else r for r in results]


def asked(results: list[dict]) -> list[list]:
    """What an evaluation was asked for, from its results."""
    return [[*(result[name] for name in ASKED), bool(result["backends"])] for result in results]


def evaluations_of(checkpoint: Path) -> list[dict]:
    """The results for exactly these weights in all reports beside the checkpoint (eval-*), with
    the public names of their texts.

    Raises UserError for a report that cannot be read, or lacks what reports say of a result.
    """
    weights, found = weights_sha256(checkpoint), []
    for file in sorted(checkpoint.resolve().parent.glob("eval-*/report.json")):
        try:
            results = json.loads(file.read_text(encoding="utf-8"))
            for result in results:
                if result.get("weights_sha256") == weights:
                    found.append(result | {"text": result["public_text"]})
                    evaluation_report(found[-1:])  # reads all that a card needs
        except KeyError as error:
            raise UserError(
                f"{file} lacks {error}, which eval.py writes now; an earlier version may have "
                "written the file: evaluate again in the same way with eval.py, or delete it"
            ) from None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{file} is no report that eval.py wrote ({error!r}): evaluate again, or delete it"
            ) from None
    return found


def write_evaluation(results: list[dict], directory) -> Path:
    """report.json, report.md and loss_by_position.png in `directory`."""
    directory = Path(directory)
    curves = {
        r["label"]: well_counted(r["loss_by_position"], r["count_by_position"]) for r in results
    }
    picture = "![Loss by position](loss_by_position.png)"
    text = f"# Evaluation\n\n{evaluation_report(results)}\n\n{picture}\n"
    with whole_directory(directory) as stage:
        (stage / "report.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        (stage / "report.md").write_text(text, encoding="utf-8")
        plot_loss_by_position(curves, stage / "loss_by_position.png")
    return directory
