"""The report of a plan's results, from these alone: tables, and a picture where matplotlib is."""

import math
from pathlib import Path
from statistics import mean

import numpy as np

from mixer.common.files import write_text
from mixer.data.config import TASKS
from mixer.reporting import tables


def write_report(result: dict, file: Path) -> str:
    """Writes PATH.md and PATH.png beside `file`, PATH.json; returns the text."""
    picture = file.with_suffix(".png")
    text = table(result)
    try:
        from mixer.comparison.figure import draw

        if draw(result, picture):
            text += f"\n![The losses of these runs]({picture.name})\n"
    except ImportError as error:
        text += f"\nNo picture: {error}.\n"
    write_text(file.with_suffix(".md"), text)
    return text


def table(result: dict) -> str:
    """Everything as Markdown."""
    parts = parts_of_kinds(result) if "kinds" in result["plan"] else parts_of_runs(result)
    if finished(result["runs"]):
        parts.append(f"{origins(result)}. The options of each run are in the JSON file.")
    return "\n\n".join(parts) + "\n"


def origins(result: dict) -> str:
    """Where results were measured whose runs are of different times."""
    # Files of older plans say once for all runs where they were measured.
    by = [result | run for run in result["runs"].values()]
    devices = ", ".join(dict.fromkeys(run["hardware"]["device"] for run in by))
    torches = ", ".join(dict.fromkeys(run["hardware"]["torch"] for run in by))
    commits = ", ".join(dict.fromkeys(run["commit"][:10] for run in by))
    return f"Measured on {devices}, torch {torches}; commit {commits}; `{result['command']}`"


# ------------------------------------------------------------------------- named runs


def parts_of_runs(result: dict) -> list[str]:
    runs = result["runs"]
    # In the order of the plan, whichever ended first.
    names = dict.fromkeys([*result["plan"].get("runs", {}), *runs])
    rows = [row_of_run(name, result) for name in names if name in runs]
    said = (
        "Training time is without start-up, evaluation and saving. A run's schedule ends at its "
        "last step. Losses are in nats per token."
    )
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    table = tables.table([{title: row[title] for title in titles} for row in rows])
    return ["# Runs compared", table, *retrieval_section(result), *seeds_section(runs), said]


def row_of_run(name: str, result: dict) -> dict[str, str]:
    """One run in words; its time is compared with that of the plan's reference."""
    row = result["runs"][name]
    reference = result["runs"].get(result["plan"].get("reference"), {})
    cells = dict.fromkeys(
        ("run", "steps", "thousand tokens/s", "training, s", "of its time", "validation loss"), ""
    ) | {"run": name, "memory, GB": "", "useful TFLOP/s": ""}
    if "failure" in row:
        return cells | {"validation loss": "failed: not finite"}
    cells["steps"] = f"{row['steps']:,}"
    cells["validation loss"] = f"{row['validation_loss']:.4f}"
    cells["memory, GB"] = f"{row['peak_memory_gb']:.1f}"
    if seconds := row.get("training_seconds"):  # unless other work was on the same GPU
        cells["thousand tokens/s"] = f"{row['tokens_per_second'] / 1e3:,.0f}"
        cells["training, s"] = f"{seconds:.1f}"
        if "training_seconds" in reference:
            cells["of its time"] = f"{seconds / reference['training_seconds']:.3f}"
    if "useful_tflops" in row:
        cells["useful TFLOP/s"] = f"{row['useful_tflops']:.3g}"
    return cells


def seeds_section(runs: dict) -> list[str]:
    """The losses of runs that were repeated with other seeds, and how far these are apart."""
    rows = []
    for first in dict.fromkeys(
        name.removesuffix(f", seed {row['seed']}") for name, row in runs.items() if "seed" in row
    ):
        own = [row for name, row in runs.items() if name.startswith(f"{first}, seed ")]
        losses = {
            row["settings"].get("seed", 0): row["validation_loss"]
            for row in [runs.get(first, {"failure": ""}), *own]
            if "failure" not in row
        }
        if losses:
            each = ", ".join(f"{loss:.4f} ({seed})" for seed, loss in losses.items())
            apart = max(losses.values()) - min(losses.values())
            row = {"run": first, "seeds": len(losses), "mean": mean(losses.values())}
            rows.append(row | {"apart": f"{apart / row['mean']:.2%}", "each (seed)": each})
    return ["## Seeds", tables.table(rows)] if rows else []


def retrieval_section(result: dict) -> list[str]:
    """How often texts find their partners among so many, after each run but those of a sweep."""
    rows = [
        {"run": name, "validation loss": f"{row['validation_loss']:.4f}"}
        | {key.replace("_", " "): f"{row[key]:.1%}" for key in row if key.startswith("top1_of_")}
        for name, row in result["runs"].items()
        if "top1_of_32" in row and row.get("budget", math.inf) > sweep_budget(result)
    ]
    return ["## Retrieval", tables.table(rows)] if rows else []


# ------------------------------------------------------------------------- kinds and sizes


def parts_of_kinds(result: dict) -> list[str]:
    runs = result["runs"]
    parts = ["# Models of several sizes for equal times"]
    if rows := longer(runs):
        parts += ["## Losses", tables.table(loss_rows(rows), keys=3)]
    if rows := accuracy_rows(result):
        parts += ["## Accuracy", tables.table(rows), "The share of the answers that are likeliest."]
    parts += retrieval_section(result) + seeds_section(runs)
    if rates := rate_rows(result):
        parts += ["## Speeds and learning rates", tables.table(rates)]
    return [*parts, notes(result)] if finished(runs) else parts


def model_of(row: dict) -> str:
    return f"{row['kind']} {row['size']}".strip()


def finished(runs: dict, kind: str | None = None) -> list[dict]:
    """The runs that ended with a loss, but for those that measured a speed, and those that repeat
    one with another seed.
    """
    return [
        row
        for row in runs.values()
        if row.get("budget") != 0 and not {"failure", "seed"} & row.keys()
        if kind in (None, row.get("kind"))
    ]


def best_size(runs: dict, kind: str, seconds: float) -> dict | None:
    """The run of a kind that has the lowest validation loss after a budget."""
    rows = [row for row in finished(runs, kind) if row["budget"] == seconds]
    return min(rows, key=lambda row: row["validation_loss"], default=None)


def longer(runs: dict) -> list[dict]:
    """The runs that follow a sweep: by time, and the best first."""
    rows = [row for row in finished(runs) if "loss_by_position" in row]
    return sorted(rows, key=lambda row: (row["budget"], row["validation_loss"]))


def loss_rows(rows: list[dict]) -> list[dict]:
    lowest = {row["budget"]: row["validation_loss"] for row in reversed(rows)}
    return [
        {
            "model": model_of(row),
            "training, s": f"{row['training_seconds']:.1f}",
            "lr": f"{row['lr']:g}",
            "steps": f"{row['steps']:,}",
            "tokens, M": f"{row['tokens'] / 1e6:.1f}",
            "epochs": f"{row['passes']:.2f}",
            "memory, GB": f"{row['peak_memory_gb']:.1f}",
            "validation loss": f"{row['validation_loss']:.4f}",
            "of the lowest": f"{row['validation_loss'] / lowest[row['budget']]:.3f}",
        }
        | ({} if any(map(is_task, rows)) else text_cells(row))
        for row in rows
    ]


def text_cells(row: dict) -> dict[str, str]:
    """Of a model of a text: its loss in bits per byte, and for tokens that are repeats and not."""
    parts = {"repeats": row["repeats_loss"], "others": row["others_loss"]}
    found = {name: "-" if loss is None else f"{loss:.3f}" for name, loss in parts.items()}
    return {"bits/byte": f"{row['bits_per_byte']:.4f}"} | found


def is_task(row: dict) -> bool:
    return row["settings"].get("data.source") in TASKS


def accuracy_rows(result: dict) -> list[dict]:
    """The kinds of a plan whose sizes are tasks, with the best accuracy of each in each."""
    rows, cells = filter(is_task, longer(result["runs"])), {}
    for row in sorted(rows, key=lambda row: row["accuracy"]):
        cells.setdefault(row["kind"], {})[row["size"]] = f"{row['accuracy']:.2%}"  # the best last
    tasks = dict.fromkeys(size for sizes in result["plan"]["kinds"].values() for size in sizes)
    found = {kind: cells[kind] for kind in result["plan"]["kinds"] if kind in cells}
    return [{"model": kind} | {t: found[kind].get(t, "") for t in tasks} for kind in found]


def mean_by_position(losses: list[float]) -> list[list[float]]:
    """Means of the losses by position, each with the position before which it ends: of positions 0,
    1 to 2, 3 to 6 and so on.
    """
    ends = {min(2**n - 1, len(losses)) for n in range(1, len(losses).bit_length() + 1)}
    ends = sorted(ends | {len(losses)})
    pairs = zip([0, *ends], ends, strict=False)
    return [[end, round(float(np.mean(losses[first:end])), 8)] for first, end in pairs]


def sweep_budget(result: dict) -> float:
    """Seconds of a sweep's runs; 0 where each model has its own rate."""
    plan = result["plan"]
    return plan["sweep_share"] * plan["seconds"] if plan.get("rates") else 0


def rate_rows(result: dict) -> list[dict]:
    """The speed of each model's longest run, and validation losses of the sweeps, a column for each
    rate, of which the best is bold.
    """
    runs = result["runs"]
    swept = [row for row in runs.values() if 0 < row["budget"] <= sweep_budget(result)]
    rates, rows = sorted({row["lr"] for row in swept}), []
    for name in dict.fromkeys(map(model_of, swept or finished(runs))):
        own = [row for row in finished(runs) if model_of(row) == name]
        if not own:
            continue
        longest = max(own, key=lambda row: (row["budget"], -row["validation_loss"]))
        row = {
            "model": name,
            "parameters, M": f"{longest['parameters'] / 1e6:.1f}",
            "thousand tokens/s": f"{longest['tokens_per_second'] / 1e3:,.1f}",
        }
        if "useful_tflops" in longest:
            row["useful TFLOP/s"] = f"{longest['useful_tflops']:.3g}"
        losses = {
            row["lr"]: row.get("validation_loss", math.inf)
            for row in swept
            if model_of(row) == name
        }
        best = min(losses, key=losses.get, default=None)
        for rate in rates:
            loss = losses.get(rate)
            text = "" if loss is None else "diverged" if math.isinf(loss) else f"{loss:.4f}"
            row[f"lr {rate:g}"] = f"**{text}**" if rate == best else text
        rows.append(row)
    return rows


def notes(result: dict) -> str:
    runs, plan = result["runs"], result["plan"]
    row = finished(runs)[0]
    settings = row["settings"]
    diverged = [
        f"{model_of(row)} ({row['budget']:g} s, lr {row['lr']:g})"
        for row in runs.values()
        if row["budget"] > sweep_budget(result) and "failure" in row
    ]
    lines = [f"Diverged: {', '.join(diverged)}."] if diverged else []
    text = f"a text of {row['training_tokens'] / 1e6:.1f}M tokens"
    lines.append(
        f"{row['tokens_a_step']:,} tokens a step in samples of "
        f"{settings.get('model.max_position_embeddings', 'the usual length')}, "
        f"{'of which answers count' if is_task(row) else text}, optimizer "
        f"{settings.get('optim.name', 'adamw')}, one GPU for each run."
    )
    if plan.get("rates"):
        lines.append(
            f"Every rate had {plan['sweep_share']:.0%} of the steps of {plan['seconds']:g} s. "
            "Longer runs have the best rate of these, and the next lower one where the table has "
            "it. If the best is the highest or the lowest tried, a better one may lie beyond."
        )
    if shares := {f"{row['repeats_share']:.1%}" for row in longer(runs) if not is_task(row)}:
        lines.append(
            f"Losses in nats per token. Repeats, {' or '.join(sorted(shares))} of the tokens: a "
            "copy from the window would predict them, as the two tokens before them occurred "
            "earlier in the window and were followed by the same token."
        )
    lines += [
        "Each run's learning rate ends its schedule at the last step, so only ends are compared.",
        "Training time is the steps by the median time of a step, without start-up, compilation, "
        "evaluation and saving. No run reads its text more than four times.",
    ]
    return "\n".join(f"- {line}" for line in lines)
