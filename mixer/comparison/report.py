"""The report of a plan, from its results alone: tables, and a picture of losses by time."""

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from mixer.common.files import write_text
from mixer.objectives.config import CANDIDATES
from mixer.reporting.figure import COLOURS, can_draw, curves, log_axis, write_names
from mixer.reporting.text import (
    ACCURACY,
    COUNT,
    LOSS,
    MEMORY,
    SECONDS,
    SPEED,
    TOP1,
    WIDTH,
    shown_width,
    wrapped,
)
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
SWEEP_COLUMNS = ("model", "lr", "validation loss", "training, s", "steps")

NOTES = (
    "Losses are in nats per token{}. Training time is the number of steps times the median time "
    "of a step, without start-up, compilation, evaluation and saving. A run's learning rate falls "
    "up to its last step: compare only the ends of runs."
)


def write_report(result: dict, file: Path) -> str:
    """Writes PATH.md and PATH.png beside `file`, PATH.json. Returns the text to print."""
    picture = file.with_suffix(".png")
    text = table(result)
    if can_draw() and draw(result, picture):
        text += f"\n![The losses of these runs]({picture.name})\n"
    write_text(file.with_suffix(".md"), text)
    return table(result, shown_width())


def table(result: dict, width: int = WIDTH) -> str:
    """Everything as Markdown."""
    make_sections = kinds_sections if "kinds" in result["plan"] else runs_sections
    sections = make_sections(result, width)
    rows = result["runs"].values()
    devices = distinct(row["hardware"]["device"] for row in rows)
    torch_versions = distinct(row["hardware"]["torch"] for row in rows)
    commits = distinct(row["commit"][:10] for row in rows)
    # Earlier versions kept one command for all runs.
    commands = distinct(row.get("command", result.get("command", "")) for row in rows)
    origin = (
        f"Measured on {', '.join(devices)}, torch {', '.join(torch_versions)}; commit "
        f"{', '.join(commits)}; `{'`, `'.join(commands)}`. "
        "The options of each run are in the JSON file."
    )
    notes = NOTES.format(", of retrieval per pair" if has_ranks(rows) else "")
    # In old results, by hand: what trains such runs today, where the command is gone.
    later = [result["note"]] if "note" in result else []
    paragraphs = [wrapped(text, width) for text in (notes, origin, *later)]
    return "\n\n".join([*sections, *paragraphs]) + "\n"


def has_ranks(rows: Iterable[dict]) -> bool:
    """Whether runs ranked candidates: their losses are of pairs."""
    return any("top1_of_32" in row for row in rows)


def distinct(values: Iterable[str]) -> list[str]:
    """The values in their order, each once: runs of one file may have been made at different times
    and places.
    """
    return list(dict.fromkeys(values))


def runs_sections(result: dict, width: int) -> list[str]:
    """The runs in the order of the plan; times are compared with that of the plan's reference."""
    runs = result["runs"]
    reference_time = runs.get(result["plan"].get("reference"), {}).get("training_seconds")
    rows = []
    for name in distinct([*result["plan"].get("runs", {}), *runs]):
        if name not in runs:
            continue
        row = runs[name]
        if reference_time and "training_seconds" in row:
            row = row | {"share_of_time": row["training_seconds"] / reference_time}
        rows.append({"run": name} | cells(row))
    return [
        *section("# Runs compared", rows, width),
        *section("## Seeds", seed_rows(runs), width),
    ]


def kinds_sections(result: dict, width: int) -> list[str]:
    """The runs that follow a sweep and pretraining, by time and the best first; then the sweep."""
    runs = result["runs"]
    swept = sweep_budgets(result["plan"])
    rows = [row for row in runs.values() if row["budget"] and "seed" not in row]
    rows = [row for row in rows if not is_pretraining(row)]
    rows.sort(key=lambda row: (row["budget"], row.get("validation_loss", math.inf)))
    longer = []
    sweep = []
    for row in rows:
        row_cells = {"model": f"{row['kind']} {row['size']}".strip()} | cells(row)
        if row["budget"] in swept:
            sweep.append({title: row_cells[title] for title in SWEEP_COLUMNS})
        else:
            longer.append(row_cells)
    sweep.sort(key=lambda row: row["model"])
    notes = "No run reads its text more than four times."
    if sweep:
        notes += " If the best rate is the highest or lowest tried, a better one may lie beyond."
    if any(row["repeats"] for row in longer):
        notes += " Repeats: tokens that a copy from the window predicts."
    return [
        "# Models at equal training time",
        *section("## Losses", longer, width, keys=3),
        *section("## Seeds", seed_rows(runs), width),
        *section("## Learning rates", sweep, width),
        *divergences(runs, width),
        wrapped(notes, width),
    ]


def divergences(runs: dict, width: int) -> list[str]:
    """Why models have no longer runs: their run that measures the speed, or their pretraining, is
    in no table.
    """
    reasons = [
        wrapped(f"{name}: {row['failure']}", width, first_indent="- ", indent="  ")
        for name, row in runs.items()
        if "failure" in row and (not row["budget"] or is_pretraining(row))
    ]
    return ["## Diverged", "\n".join(reasons)] if reasons else []


def is_pretraining(row: dict) -> bool:
    return row["kind"].endswith("pretraining")


def sweep_budgets(plan: dict) -> set[float]:
    """The seconds of the runs that choose a rate."""
    if not plan.get("rates"):
        return set()
    entries = [entry or {} for sizes in plan["kinds"].values() for entry in sizes.values()]
    budgets = [budget for entry in entries for budget in entry.get("seconds", [plan["seconds"]])]
    return {plan["sweep_share"] * budget for budget in budgets}


def cells(row: dict) -> dict[str, str]:
    """A run's numbers in words; empty where it has none."""
    texts = {
        title: "" if row.get(key) is None else f"{row[key] / unit:{form}}"
        for title, (key, unit, form) in COLUMNS.items()
    }
    if "failure" in row:
        texts["validation loss"] = "diverged"
    return texts


def section(title: str, rows: list[dict], width: int, keys: int = 1) -> list[str]:
    """A table under its title, without empty columns; nothing if it has no rows."""
    if not rows:
        return []
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    filled = [{title: row[title] for title in titles} for row in rows]
    return [title, markdown_table(filled, keys, width)]


def seed_rows(runs: dict) -> list[dict]:
    """The losses of repeated runs, and how far these are apart."""
    rows = []
    for name, repetitions in repeated(runs).items():
        losses = {row["settings"].get("seed", 0): row["validation_loss"] for row in repetitions}
        mean_loss = mean(losses.values())
        spread = max(losses.values()) - min(losses.values())
        row = {
            "run": name,
            "seeds": len(losses),
            "mean": mean_loss,
            "apart": f"{spread / mean_loss:.2%}",
            "each (seed)": ", ".join(f"{loss:{LOSS}} ({seed})" for seed, loss in losses.items()),
        }
        rows.append(row)
    return rows


def finished(runs: dict, kind_name: str | None = None) -> list[dict]:
    """The runs of a kind, or of all, that ended with a loss, but for other seeds and speeds."""
    rows = [row for row in runs.values() if row["budget"] and not {"seed", "failure"} & row.keys()]
    return [row for row in rows if kind_name in (None, row["kind"])]


def best_size(runs: dict, kind_name: str, seconds: float) -> dict | None:
    """The run of a kind that has the lowest validation loss after a budget."""
    rows = [row for row in finished(runs, kind_name) if row["budget"] == seconds]
    return min(rows, key=lambda row: row["validation_loss"], default=None)


def repeated(runs: dict) -> dict[str, list[dict]]:
    """By name, each run that was repeated with other seeds: all its rows that have a loss."""
    repetitions: dict[str, list[dict]] = {}
    for name, row in runs.items():
        if "seed" in row:
            first = name.removesuffix(f", seed {row['seed']}")
            repetitions.setdefault(first, [runs[first]]).append(row)
    with_loss = {
        name: [row for row in rows if "validation_loss" in row]
        for name, rows in repetitions.items()
    }
    return {name: rows for name, rows in with_loss.items() if rows}


def draw(result: dict, output: Path) -> bool:
    """Whether it drew losses by training time: not of retrieval, of more runs than colours, nor of a
    single separate run.
    """
    runs = result["runs"]
    kinds = result["plan"].get("kinds")
    if kinds:
        swept = sweep_budgets(result["plan"])
        runs = {n: row for n, row in runs.items() if row["budget"] not in swept}
    if has_ranks(runs.values()):
        return False
    with_curve = {n: row for n, row in runs.items() if "loss" in row and "seed" not in row}
    if kinds is None:
        if not 0 < len(with_curve) <= len(COLOURS):
            return False
        title = "Training loss (dot: validation)"
    else:
        if len(finished(runs)) < 2:
            return False
        title = "Validation loss of separate runs (bar: spread of seeds)"
    with curves(output, title, "training time (s)", "loss (nats)") as axes:
        if kinds is None:
            draw_runs(axes, with_curve)
        else:
            draw_kinds(axes, kinds, runs)
    return True


def draw_runs(axes, runs: dict) -> None:
    """Each run's training loss from a tenth of its steps on, and its validation loss at the end."""
    names = []
    last = max(row["training_seconds"] for row in runs.values())
    for number, (name, row) in enumerate(runs.items()):
        colour = f"C{number}"
        seconds = row["training_seconds"]
        validation_loss = row["validation_loss"]
        steps, losses = zip(
            *(point for point in row["loss"] if 10 * point[0] >= row["steps"]), strict=True
        )
        times = [step * seconds / row["steps"] for step in steps]
        axes.plot(times, losses, color=colour, linewidth=1)
        axes.plot(seconds, validation_loss, "o", color=colour, markersize=6)
        names.append((last, validation_loss, f"{name}: {validation_loss:.3f}", colour))
    write_names(axes, names)


def draw_kinds(axes, kinds: dict, runs: dict) -> None:
    """A dot for the lowest loss of each kind after each time, with a bar for the spread of seeds,
    and its name beside the last. No lines: after another time, another model may be the best.
    """
    # In the order of the plan, so that what plans have in common looks the same.
    kind_names = distinct([*kinds, *(row["kind"] for row in finished(runs))])
    drawn = [kind_name for kind_name in kind_names if finished(runs, kind_name)]
    names = []
    all_budgets = set()
    for number, kind_name in enumerate(drawn):
        colour = f"C{number}"
        budgets = sorted({row["budget"] for row in finished(runs, kind_name)})
        all_budgets.update(budgets)
        best = [row for budget in budgets if (row := best_size(runs, kind_name, budget))]
        times = [row["training_seconds"] for row in best]
        losses = [row["validation_loss"] for row in best]
        axes.plot(times, losses, "o", color=colour, markersize=6)
        names.append((times[-1], losses[-1], kind_name, colour))
        for rows in repeated(runs).values():
            if rows[0] in best:
                draw_spread(axes, rows, colour)
    log_axis(axes.xaxis, ticks=sorted(all_budgets))
    axes.set_xlim(min(all_budgets) / 2, max(all_budgets) * 2)  # a second apart is not far apart
    write_names(axes, names)


def draw_spread(axes, rows: list[dict], colour: str) -> None:
    """A bar from the lowest to the highest loss of repetitions, at the time of the first."""
    losses = [row["validation_loss"] for row in rows]
    ends = [min(losses), max(losses)]
    times = [rows[0]["training_seconds"]] * 2
    axes.plot(times, ends, color=colour, linewidth=5, alpha=0.4, solid_capstyle="butt")
