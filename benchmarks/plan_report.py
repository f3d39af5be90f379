"""The report of train_plan.py, from its results alone: PATH.md, and PATH.png where matplotlib is.

python benchmarks/plan_report.py PATH.json
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from saving import origins

from mixer.common.errors import run_command
from mixer.common.files import write_text
from mixer.reporting import tables

JUMP = 1.02  # a longer run's loss at so many times a shorter one's counts as jumped
RANGES = (0, 8, 64, 256, 512, 2048, 8192)  # of the positions that a table shows together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="PATH.json of train_plan.py")
    options = parser.parse_args()
    if not options.results.is_file():
        parser.error(f"{options.results} is not a file; give PATH.json of train_plan.py")
    print(write_report(options.results))


def write_report(file: Path) -> str:
    """Writes PATH.md and PATH.png beside PATH.json; returns the text."""
    result = json.loads(file.read_text())
    picture = file.with_suffix(".png")
    text = table(result)
    try:
        from plan_figure import draw

        if draw(result, picture):
            text += f"\n![The losses of these runs]({picture.name})\n"
    except ImportError as error:
        text += f"\nNo picture: {error}.\n"
    write_text(file.with_suffix(".md"), text)
    return text


def table(result: dict) -> str:
    return table_of_kinds(result) if "kinds" in result["plan"] else table_of_runs(result)


# ------------------------------------------------------------------------- named runs


def table_of_runs(result: dict) -> str:
    # In the order of the plan, whichever ended first.
    names = dict.fromkeys([*result["plan"].get("runs", {}), *result["runs"]])
    rows = [row_of_run(name, result) for name in names if name in result["runs"]]
    columns = list(dict.fromkeys(key for row in rows for key in row if row[key]))
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    lines += ["| " + " | ".join(row.get(key, "") for key in columns) + " |" for row in rows]
    shared = any("training_seconds" not in row for row in finished(result["runs"]))
    return (
        "# Runs compared\n\n"
        + "\n".join(lines)
        + "\n\nThe time is training alone, without start-up, evaluation and saving. A run's "
        "schedule ends at its last step. The rise is how far the logged training loss climbs after "
        "the warm-up above its lowest value before. Losses are in nats per token."
        + (" Runs without a time shared their GPU with other work." if shared else "")
        + f"\n\nMeasured on {origins(result)}. The options of each run are in the JSON file.\n"
    )


def row_of_run(name: str, result: dict) -> dict[str, str]:
    """One run in words; loss and time are compared with those of the reference."""
    runs = result["runs"]
    row, reference = runs[name], runs.get(result["plan"].get("reference"), {})
    if "failure" in row:
        return {"run": name, "validation loss": f"failed: {row['failure'].splitlines()[0]}"}
    seconds, norm = row.get("training_seconds"), row["largest_grad_norm"]
    found = {
        "run": name,
        "steps": f"{row['steps']:,}",
        "thousand tokens/s": f"{row['tokens_per_second'] / 1e3:,.0f}" if seconds else "",
        "training, s": f"{seconds:.1f}" if seconds else "",
        "validation loss": f"{row['validation_loss']:.4f}",
        "largest rise of the loss": f"{row['largest_rise']:.1%}",
        "largest gradient norm": "" if norm is None else f"{norm:.1f}",
        "memory, GB": f"{row['peak_memory_gb']:.1f}",
    }
    if "validation_loss" in reference:
        less = row["validation_loss"] - reference["validation_loss"]
        found["loss to the reference's"] = f"{less:+.4f}"
        timed = seconds and "training_seconds" in reference
        found["of its time"] = f"{seconds / reference['training_seconds']:.3f}" if timed else ""
    return found


# ------------------------------------------------------------------------- kinds and sizes


def table_of_kinds(result: dict) -> str:
    runs = result["runs"]
    parts = ["# Models of several sizes for equal times"]
    if longer(runs):
        parts += ["## Losses", tables.table(loss_rows(runs), keys=3)]
        parts += ["## Where each is better", tables.table(where_rows(runs), keys=2), how_split()]
    if rates := rate_rows(result):
        parts += ["## Speeds and learning rates", tables.table(rates)]
    if finished(runs):
        parts += [notes(result)]
    return "\n\n".join(parts) + "\n"


def finished(runs: dict, kind: str | None = None) -> list[dict]:
    """The runs that ended with a loss, but for those that measured a speed."""
    return [
        row
        for row in runs.values()
        if row.get("budget") != 0 and "failure" not in row and kind in (None, row.get("kind"))
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
            "model": f"{row['kind']} {row['size']}",
            "training, s": f"{row['training_seconds']:.1f}",
            "lr": f"{row['lr']:g}",
            "steps": f"{row['steps']:,}",
            "tokens, M": f"{row['tokens'] / 1e6:.1f}",
            "epochs": f"{row['passes']:.2f}",
            "memory, GB": f"{row['peak_memory_gb']:.1f}",
            "validation loss": f"{row['validation_loss']:.4f}",
            "of the lowest": f"{row['validation_loss'] / lowest[row['budget']]:.3f}",
            "bits/byte": f"{row['bits_per_byte']:.4f}",
        }
        for row in longer(runs)
    ]


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
        {"model": f"{row['kind']} {row['size']}", "s": f"{row['budget']:g}"}
        | position_cells(row["loss_by_position"])
        | {
            "repeats": kind_cell(row["repeats_loss"]),
            "others": kind_cell(row["others_loss"]),
            "share of repeats": f"{row['repeats_share']:.1%}",
        }
        for row in longer(runs)
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
    return result["plan"]["sweep_share"] * result["plan"]["seconds"]


def rate_rows(result: dict) -> list[dict]:
    """Validation losses of the sweeps, a column for each rate, of which the best is bold; and the
    speeds of the longest runs.
    """
    swept = [row for row in result["runs"].values() if 0 < row["budget"] <= sweep_budget(result)]
    rates = sorted({row["lr"] for row in swept})
    rows = []
    for name in dict.fromkeys((row["kind"], row["size"]) for row in swept):
        own = {row["lr"]: row for row in swept if (row["kind"], row["size"]) == name}
        losses = {rate: row.get("validation_loss", math.inf) for rate, row in own.items()}
        best = min(losses.values())
        if math.isinf(best):
            continue
        longest = longest_run(result["runs"], *name)
        row = {
            "model": " ".join(name),
            "parameters, M": f"{longest['parameters'] / 1e6:.1f}",
            "thousand tokens/s": f"{longest['tokens_per_second'] / 1e3:,.1f}",
            "steps of a sweep's run": f"{own[min(losses, key=losses.get)]['steps']:,}",
        }
        for rate in rates:
            loss = losses.get(rate)
            cell = "" if loss is None else "diverged" if math.isinf(loss) else f"{loss:.4f}"
            row[f"lr {rate:g}"] = f"**{cell}**" if loss == best else cell
        rows.append(row)
    return rows


def longest_run(runs: dict, kind: str, size: str) -> dict:
    """Of a model's longest runs, whose speed is the surest, the best."""
    own = [row for row in finished(runs, kind) if row["size"] == size]
    return max(own, key=lambda row: (row["budget"], -row["validation_loss"]))


def notes(result: dict) -> str:
    runs, plan = result["runs"], result["plan"]
    rows = finished(runs)
    settings = rows[0]["settings"]
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
    had = {(row["kind"], row["size"]) for row in rows}
    planned = [(kind, str(size)) for kind, sizes in plan["kinds"].items() for size in sizes]
    if not_run := [" ".join(model) for model in planned if model not in had]:
        lines.append(f"In the plan and not run: {', '.join(not_run)}.")
    lines += [
        f"{rows[0]['tokens_a_step']:,} tokens a step in samples of "
        f"{settings['model.max_position_embeddings']}, a text of "
        f"{rows[0]['training_tokens'] / 1e6:.1f}M tokens, optimizer "
        f"{settings.get('optim.name', 'adamw')}, one GPU for each run, one run of each.",
        f"Every rate had {plan['sweep_share']:.0%} of the steps of {plan['seconds']:g} s. Longer "
        "runs have the best rate of these, and the next lower one where the table has it. Each "
        "run's learning rate ends its schedule at the last step, so only ends are compared.",
        "Training time is the steps by the median time of a step, without start-up, compilation, "
        "evaluation and saving. No run reads its text more than four times.",
        f"Measured on {origins(result, rows)}. The options of each run are in the JSON file.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def named_note(what: str, rows: list[dict]) -> list[str]:
    named = [f"{r['kind']} {r['size']} ({r['budget']:g} s, lr {r['lr']:g})" for r in rows]
    return [f"{what}: {', '.join(named)}."] if named else []


if __name__ == "__main__":
    run_command(main)
