"""The report of a plan's results, from these alone: tables, and a picture where matplotlib is."""

import math
from pathlib import Path
from statistics import mean

import numpy as np

from mixer.common.files import write_text
from mixer.data.config import TASKS
from mixer.reporting import tables

JUMP = 1.02  # a longer run's loss at so many times a shorter one's counts as jumped
RANGES = (0, 8, 64, 256, 512, 2048, 8192)  # of the positions that a table shows together


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


def origins(result: dict, runs: list[dict] | None = None) -> str:
    """Where results were measured whose runs (all, or these) are of different times."""
    # Files of older plans say once for all runs where they were measured.
    by = [result | run for run in runs or result["runs"].values()]
    devices = ", ".join(dict.fromkeys(run["hardware"]["device"] for run in by))
    torches = ", ".join(dict.fromkeys(run["hardware"]["torch"] for run in by))
    commits = ", ".join(dict.fromkeys(run["commit"][:10] for run in by))
    return f"{devices}, torch {torches}; commit {commits}; `{result['command']}`"


def table(result: dict) -> str:
    return table_of_kinds(result) if "kinds" in result["plan"] else table_of_runs(result)


# ------------------------------------------------------------------------- named runs


def table_of_runs(result: dict) -> str:
    runs = result["runs"]
    # In the order of the plan, whichever ended first.
    names = dict.fromkeys([*result["plan"].get("runs", {}), *runs])
    rows = [row_of_run(name, result) for name in names if name in runs]
    columns = list(dict.fromkeys(key for row in rows for key in row if row[key]))
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    lines += ["| " + " | ".join(row.get(key, "") for key in columns) + " |" for row in rows]
    shared = any("training_seconds" not in row for row in finished(runs))
    said = (
        "The time is training alone, without start-up, evaluation and saving. A run's "
        "schedule ends at its last step. The rise is how far the logged training loss climbs after "
        "the warm-up above its lowest value before. Losses are in nats per token."
        + (" Runs without a time shared their GPU with other work." if shared else "")
    )
    parts = ["# Runs compared", "\n".join(lines), *retrieval_section(result), *seeds_section(runs)]
    parts += [*agreement(result), said]
    origin = f"Measured on {origins(result)}. The options of each run are in the JSON file."
    return "\n\n".join([*parts, origin]) + "\n"


def agreement(result: dict) -> list[str]:
    """How far the training losses of backends are apart: of runs that have the reference's other
    options, at the steps that both results have.
    """
    reference = result["runs"].get(result["plan"].get("reference"), {})
    found = []
    for name, row in result["runs"].items():
        if row is reference or not {"loss"} <= row.keys() & reference.keys():
            continue
        if without_backend(row) == without_backend(reference):
            ours, theirs = dict(reference["loss"]), dict(row["loss"])
            gaps = {step: abs(theirs[step] / ours[step] - 1) for step in ours.keys() & theirs}
            worst = max(gaps, key=gaps.get)
            found.append(
                f"{result['plan']['reference']} and {name}: training losses apart by "
                f"{gaps[worst]:.2%} at most (step {worst}), {mean(gaps.values()):.2%} on average "
                f"over {len(gaps)} steps."
            )
    return found


def without_backend(row: dict) -> dict:
    settings = {key: value for key, value in row["settings"].items() if value is not None}
    return settings | {"model.mixing_backend": None}


def row_of_run(name: str, result: dict) -> dict[str, str]:
    """One run in words; loss and time are compared with those of the reference."""
    runs = result["runs"]
    row, reference = runs[name], runs.get(result["plan"].get("reference"), {})
    if "failure" in row:
        return {"run": name, "validation loss": f"failed: {row['failure'].splitlines()[0]}"}
    seconds = row.get("training_seconds")
    found = {
        "run": name,
        "steps": f"{row['steps']:,}",
        "thousand tokens/s": f"{row['tokens_per_second'] / 1e3:,.0f}" if seconds else "",
        "training, s": f"{seconds:.1f}" if seconds else "",
        "validation loss": f"{row['validation_loss']:.4f}",
        "largest rise of the loss": f"{row['largest_rise']:.1%}",
        "memory, GB": f"{row['peak_memory_gb']:.1f}",
        "useful TFLOP/s": f"{row['useful_tflops']:.3g}" if "useful_tflops" in row else "",
    }
    if "validation_loss" in reference:
        less = row["validation_loss"] - reference["validation_loss"]
        found["loss to the reference's"] = f"{less:+.4f}"
        timed = seconds and "training_seconds" in reference
        found["of its time"] = f"{seconds / reference['training_seconds']:.3f}" if timed else ""
    return found


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


def table_of_kinds(result: dict) -> str:
    runs = result["runs"]
    parts = ["# Models of several sizes for equal times"]
    if longer(runs):
        parts += ["## Losses", tables.table(loss_rows(runs), keys=3)]
    if rows := accuracy_rows(result):
        parts += ["## Accuracy", tables.table(rows), "The share of the answers that are likeliest."]
    if rows := where_rows(runs):
        parts += ["## Where each is better", tables.table(rows, keys=2), how_split()]
    parts += retrieval_section(result) + seeds_section(runs)
    if rates := rate_rows(result):
        parts += ["## Speeds and learning rates", tables.table(rates)]
    if finished(runs):
        parts += [notes(result)]
    return "\n\n".join(parts) + "\n"


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


def has_jumped(runs: dict, row: dict) -> bool:
    """Whether a run ended above a shorter one of the same model: its loss has jumped on the way and
    not come back, so it says nothing of what that time is worth.
    """
    return any(
        row["validation_loss"] > JUMP * other["validation_loss"]
        for other in finished(runs, row["kind"])
        if other["size"] == row["size"] and other["budget"] < row["budget"]
    )


def longer(runs: dict) -> list[dict]:
    """The runs that follow a sweep: by time, and the best first."""
    rows = [row for row in finished(runs) if "loss_by_position" in row]
    return sorted(rows, key=lambda row: (row["budget"], row["validation_loss"]))


def loss_rows(runs: dict) -> list[dict]:
    lowest: dict[float, float] = {}
    for row in longer(runs):  # the best of a time first
        lowest.setdefault(row["budget"], row["validation_loss"])
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
            "bits/byte": "" if is_task(row) else f"{row['bits_per_byte']:.4f}",
        }
        for row in longer(runs)
    ]


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
    1 to 2, 3 to 6 and so on, which the ranges of the table divide further.
    """
    powers = {2**n - 1 for n in range(len(losses).bit_length() + 1)}
    ends = sorted(end for end in {*powers, *RANGES, len(losses)} if 0 < end <= len(losses))
    pairs = zip([0, *ends], ends, strict=False)
    return [[end, round(float(np.mean(losses[first:end])), 8)] for first, end in pairs]


def mean_between(means: list[list[float]], first: int, last: int) -> float:
    """The mean loss of the positions from `first` to before `last`."""
    sizes = np.diff([0, *(end for end, _ in means)])
    inside = [first < end <= last for end, _ in means]
    return float(np.average([mean for _, mean in means], weights=sizes * inside))


def where_rows(runs: dict) -> list[dict]:
    return [
        {"model": model_of(row), "s": f"{row['budget']:g}"}
        | position_cells(row["loss_by_position"])
        | {
            "repeats": kind_cell(row["repeats_loss"]),
            "others": kind_cell(row["others_loss"]),
            "share of repeats": f"{row['repeats_share']:.1%}",
        }
        for row in longer(runs)
        if row["loss_by_position"]
    ]


def position_cells(means: list[list[float]]) -> dict[str, str]:
    return {
        f"positions {first} to {end}": f"{mean_between(means, first, end):.3f}"
        for first, end in zip(RANGES, RANGES[1:], strict=False)
        if first < means[-1][0]
    }


def kind_cell(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def how_split() -> str:
    return (
        "Losses in nats per token. Position: how many tokens of the window come before the one "
        "that is read last. Repeats: tokens that a copy from the window would predict, as the two "
        "tokens before them occurred earlier in the window and were followed by the same token."
    )


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
        longest = longest_run(runs, name)
        if not longest:
            continue
        row = {
            "model": name,
            "parameters, M": f"{longest['parameters'] / 1e6:.1f}",
            "thousand tokens/s": f"{longest['tokens_per_second'] / 1e3:,.1f}",
        }
        if "useful_tflops" in longest:
            row["useful TFLOP/s"] = f"{longest['useful_tflops']:.3g}"
        own = {row["lr"]: row for row in swept if model_of(row) == name}
        losses = {rate: one.get("validation_loss", math.inf) for rate, one in own.items()}
        best = min(losses, key=losses.get, default=None)
        if own:
            row["steps of a sweep's run"] = f"{own[best].get('steps', 0):,}"
        for rate in rates:
            loss = losses.get(rate)
            cell = "" if loss is None else "diverged" if math.isinf(loss) else f"{loss:.4f}"
            row[f"lr {rate:g}"] = f"**{cell}**" if rate == best else cell
        rows.append(row)
    return rows


def best_at_an_edge(result: dict) -> list[str]:
    """Models whose best rate may lie outside of those that a sweep tried."""
    swept = [row for row in finished(result["runs"]) if row["budget"] <= sweep_budget(result)]
    found = []
    for name in dict.fromkeys(map(model_of, swept)):
        losses = {row["lr"]: row["validation_loss"] for row in swept if model_of(row) == name}
        best = min(losses, key=losses.get)
        if len(losses) > 1 and best in (min(losses), max(losses)):
            found.append(f"{name} ({best:g})")
    return found


def longest_run(runs: dict, model: str) -> dict | None:
    """Of a model's longest runs, whose speed is the surest, the best."""
    own = [row for row in finished(runs) if model_of(row) == model]
    return max(own, key=lambda row: (row["budget"], -row["validation_loss"]), default=None)


def notes(result: dict) -> str:
    runs, plan = result["runs"], result["plan"]
    rows = finished(runs)
    settings, text = rows[0]["settings"], f"{rows[0]['training_tokens'] / 1e6:.1f}M tokens"
    lines = named_note(
        "Diverged",
        [row for row in runs.values() if row["budget"] > sweep_budget(result) and "failure" in row],
    )
    jumped = [row for row in longer(runs) if has_jumped(runs, row)]
    lines += named_note(
        "Ended above a shorter run of the same model, as the loss jumped at this rate (the picture "
        "leaves it out)",
        jumped,
    )
    if edges := best_at_an_edge(result):
        lines.append(
            f"The best rate is the lowest or the highest tried, and a better one may lie beyond: "
            f"{', '.join(edges)}."
        )
    had = set(map(model_of, rows))
    planned = [f"{kind} {size}".strip() for kind, sizes in plan["kinds"].items() for size in sizes]
    if not_run := [model for model in planned if model not in had]:
        lines.append(f"In the plan and not run: {', '.join(not_run)}.")
    lines += [
        f"{rows[0]['tokens_a_step']:,} tokens a step in samples of "
        f"{settings.get('model.max_position_embeddings', 'the usual length')}, "
        f"{'of which answers count' if is_task(rows[0]) else 'a text of ' + text}, optimizer "
        f"{settings.get('optim.name', 'adamw')}, one GPU for each run.",
        (
            f"Every rate had {plan['sweep_share']:.0%} of the steps of {plan['seconds']:g} s. "
            "Longer runs have the best rate of these, and the next lower one where the table has "
            "it. "
            if plan.get("rates")
            else ""
        )
        + "Each run's learning rate ends its schedule at the last step, so only ends are compared.",
        "Training time is the steps by the median time of a step, without start-up, compilation, "
        "evaluation and saving. No run reads its text more than four times.",
        f"Measured on {origins(result, rows)}. The options of each run are in the JSON file.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def named_note(what: str, rows: list[dict]) -> list[str]:
    named = [f"{model_of(row)} ({row['budget']:g} s, lr {row['lr']:g})" for row in rows]
    return [f"{what}: {', '.join(named)}."] if named else []
