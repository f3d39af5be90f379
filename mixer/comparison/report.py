"""The report of a plan, from its results alone: tables, and a picture of losses by time."""

import math
from pathlib import Path
from statistics import mean

from mixer.common.files import write_text
from mixer.models.retrieval import CANDIDATES
from mixer.reporting.figure import COLOURS, GREY, can_draw, curves, log_axis
from mixer.reporting.text import ACCURACY, COUNT, LOSS, MEMORY, SECONDS, SPEED, TOP1, wrapped
from mixer.reporting.text import table as markdown_table

# The columns of a run's numbers: the key, what to divide by, and the format.
COLUMNS = {
    "training, s": ("training_seconds", 1, SECONDS),
    "lr": ("lr", 1, "g"),
    "validation loss": ("validation_loss", 1, LOSS),
    "of its time": ("share_of_time", 1, ".3f"),
    "bits/byte": ("bits_per_byte", 1, LOSS),
    "accuracy": ("accuracy", 1, ACCURACY),
    "repeats": ("repeats_loss", 1, ".3f"),
    "others": ("others_loss", 1, ".3f"),
    **{f"top1 of {count}": (f"top1_of_{count}", 1, TOP1) for count in CANDIDATES},
    "steps": ("steps", 1, COUNT),
    "tokens, M": ("tokens", 1e6, ".1f"),
    "memory, GB": ("peak_memory_gb", 1, MEMORY),
    "epochs": ("passes", 1, ".2f"),
    "parameters, M": ("parameters", 1e6, ".1f"),
    "tokens/s": ("tokens_per_second", 1, SPEED),
    "useful TFLOP/s": ("useful_tflops", 1, ".3g"),
}
BAR = {"linewidth": 5, "alpha": 0.4, "solid_capstyle": "butt"}
OF_SWEEP = ("model", "lr", "validation loss", "training, s", "steps")

NOTES = (
    "Losses are in nats per token{}. Training time is the number of steps times the median time "
    "of a step, without start-up, compilation, evaluation and saving. A run's learning rate falls "
    "up to its last step: compare only the ends of runs."
)


def write_report(result: dict, file: Path) -> str:
    """Writes PATH.md and PATH.png beside `file`, PATH.json; returns the text."""
    picture, text = file.with_suffix(".png"), table(result)
    if can_draw() and draw(result, picture):
        text += f"\n![The losses of these runs]({picture.name})\n"
    write_text(file.with_suffix(".md"), text)
    return text


def table(result: dict) -> str:
    """Everything as Markdown."""
    parts = parts_of_kinds(result) if "kinds" in result["plan"] else parts_of_runs(result)
    # Runs of one file may be of different times.
    older = {"command": result.get("command")}  # earlier versions kept one for all runs
    found = [older | run | run["hardware"] for run in result["runs"].values()]
    names = ("device", "torch", "commit", "command")
    device, torch, commit, command = ({each[name]: None for each in found} for name in names)
    origin = (
        f"Measured on {', '.join(device)}, torch {', '.join(torch)}; commit "
        f"{', '.join(name[:10] for name in commit)}; `{'`, `'.join(command)}`. "
        "The options of each run are in the JSON file."
    )
    notes = NOTES.format(", of retrieval per pair" * any("top1_of_32" in run for run in found))
    return "\n\n".join([*parts, *map(wrapped, (notes, origin))]) + "\n"


def parts_of_runs(result: dict) -> list[str]:
    """The runs in the order of the plan; times are compared with that of the plan's reference."""
    runs, rows = result["runs"], []
    time = runs.get(result["plan"].get("reference"), {}).get("training_seconds")
    for name in dict.fromkeys([*result["plan"].get("runs", {}), *runs]):
        row = runs.get(name, {})
        if time and "training_seconds" in row:
            row = row | {"share_of_time": row["training_seconds"] / time}
        rows += [{"run": name} | cells(row)] if row else []
    return section("# Runs compared", rows) + section("## Seeds", seed_rows(runs))


def parts_of_kinds(result: dict) -> list[str]:
    """The runs that follow a sweep and pretraining, by time and the best first; then the sweep."""
    plan, runs = result["plan"], result["runs"]
    sweep = plan["sweep_share"] * plan["seconds"] if plan.get("rates") else 0
    rows = [row for row in runs.values() if row["budget"] and "seed" not in row]
    rows = [row for row in rows if not row["kind"].endswith("pretraining")]
    rows.sort(key=lambda row: (row["budget"], row.get("validation_loss", math.inf)))
    ends, tried = [], []
    for row in rows:
        shown = {"model": f"{row['kind']} {row['size']}".strip()} | cells(row)
        if row["budget"] > sweep:
            ends.append(shown)
        else:
            tried.append({title: shown[title] for title in OF_SWEEP})
    tried.sort(key=lambda row: row["model"])
    notes = "No run reads its text more than four times."
    if tried:
        notes += " If the best rate is the highest or lowest tried, a better one may lie beyond."
    if any(row["repeats"] for row in ends):
        notes += " Repeats: tokens that a copy from the window predicts."
    parts = ["# Models at equal training time", *section("## Losses", ends, keys=3)]
    parts += section("## Seeds", seed_rows(runs))
    return [*parts, *section("## Learning rates", tried), wrapped(notes)]


def cells(row: dict) -> dict[str, str]:
    """A run's numbers in words; empty where it has none."""
    found = {
        title: "" if row.get(key) is None else f"{row[key] / unit:{form}}"
        for title, (key, unit, form) in COLUMNS.items()
    }
    return found | ({"validation loss": "diverged"} if "failure" in row else {})


def section(title: str, rows: list[dict], keys: int = 1) -> list[str]:
    """A table under its title, without empty columns; nothing if it has no rows."""
    titles = [name for name in (rows[0] if rows else {}) if any(row[name] for row in rows)]
    filled = [{name: row[name] for name in titles} for row in rows]
    return [title, markdown_table(filled, keys)] if rows else []


def seed_rows(runs: dict) -> list[dict]:
    """The losses of repeated runs, and how far these are apart."""
    rows = []
    for name, own in repeated(runs).items():
        losses = {row["settings"].get("seed", 0): row["validation_loss"] for row in own}
        middle, apart = mean(losses.values()), max(losses.values()) - min(losses.values())
        each = ", ".join(f"{loss:{LOSS}} ({seed})" for seed, loss in losses.items())
        row = {"run": name, "seeds": len(losses), "mean": middle}
        rows.append(row | {"apart": f"{apart / middle:.2%}", "each (seed)": each})
    return rows


def finished(runs: dict, kind: str | None = None) -> list[dict]:
    """The runs of a kind, or of all, that ended with a loss, but for other seeds and speeds."""
    rows = [row for row in runs.values() if row["budget"] and not {"seed", "failure"} & row.keys()]
    return [row for row in rows if kind in (None, row["kind"])]


def best_size(runs: dict, kind: str, seconds: float) -> dict | None:
    """The run of a kind that has the lowest validation loss after a budget."""
    rows = [row for row in finished(runs, kind) if row["budget"] == seconds]
    return min(rows, key=lambda row: row["validation_loss"], default=None)


def repeated(runs: dict) -> dict[str, list[dict]]:
    """By name, each run that was repeated with other seeds: all its rows that have a loss."""
    found: dict[str, list[dict]] = {}
    for name, row in runs.items():
        if "seed" in row:
            first = name.removesuffix(f", seed {row['seed']}")
            found.setdefault(first, [runs[first]]).append(row)
    found = {name: [row for row in own if "failure" not in row] for name, own in found.items()}
    return {name: own for name, own in found.items() if own}


def draw(result: dict, output: Path) -> bool:
    """Whether it drew losses by training time: not of retrieval, nor of more runs than colours."""
    runs, kinds = result["runs"], result["plan"].get("kinds")
    if kinds:  # without the sweep
        runs = {n: row for n, row in runs.items() if row["budget"] >= result["plan"]["seconds"]}
    timed = {name: row for name, row in runs.items() if "loss" in row and "seed" not in row}
    drawable = 0 < len(timed) <= len(COLOURS) if kinds is None else finished(runs)
    if not drawable or any("top1_of_32" in row for row in runs.values()):
        return False
    title = "Training loss (dot: validation)" if kinds is None else "Validation loss, separate runs"
    with curves(output, title, "training time (s)", "loss (nats)") as axes:
        if kinds is None:
            draw_runs(axes, timed)
        else:
            draw_kinds(axes, kinds, runs)
    return True


def draw_runs(axes, runs: dict) -> None:
    for number, (name, row) in enumerate(runs.items()):
        steps, losses = zip(*row["loss"], strict=True)
        time, end, look = row["training_seconds"], row["validation_loss"], f"C{number}-"
        times = [step * time / row["steps"] for step in steps]
        axes.plot(times, losses, look, linewidth=1)
        axes.plot(time, end, look + "o", markersize=6, label=f"{name}, validation {end:.3f}")


def draw_kinds(axes, kinds: dict, runs: dict) -> None:
    """The lowest loss of each kind after each time, with a bar for the spread of seeds."""
    # In the order of the plan, so that what plans have in common looks the same.
    kinds = dict.fromkeys([*kinds, *(row["kind"] for row in finished(runs))])
    for number, kind in enumerate(kind for kind in kinds if finished(runs, kind)):
        budgets, colour = sorted({row["budget"] for row in finished(runs, kind)}), f"C{number}"
        best = [best_size(runs, kind, budget) for budget in budgets]
        ends = [(row["training_seconds"], row["validation_loss"]) for row in best]
        axes.plot(*zip(*ends, strict=True), "o-", label=kind, color=colour)
        for rows in repeated(runs).values():
            if rows[0] in best:
                losses, time = [row["validation_loss"] for row in rows], rows[0]["training_seconds"]
                axes.plot([time, time], [min(losses), max(losses)], color=colour, **BAR)
    if repeated(runs):
        axes.plot([], [], color=GREY, label="spread of seeds, if larger than a dot", **BAR)
    log_axis(axes.xaxis)
