"""The report of model_sizes.py, from its results alone: PATH.md, and PATH.png where matplotlib is.

python benchmarks/model_sizes_report.py PATH.json
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from saving import origins

from mixer.common.errors import run_command
from mixer.common.files import write_text
from mixer.reporting import tables

JUMP = 1.02  # a longer run's loss at so many times a shorter one's counts as jumped
EDGES = (0, 8, 64, 256, 512, 2048, 8192)  # of the positions whose losses are shown together


@dataclass(frozen=True)
class End:
    """Where a run ended."""

    seconds: float  # of training
    loss: float  # validation, nats per token
    size: str


@dataclass(frozen=True)
class Fit:
    """loss = scale x seconds^power, by least squares of log loss on log seconds."""

    scale: float
    power: float
    r2: float
    worst: float  # largest distance of a loss from the line, relative
    ends: list[End]  # what it is fitted to

    def at(self, seconds):
        return self.scale * seconds**self.power


def best_size(runs: dict, kind: str, seconds: float) -> dict | None:
    """The run of a kind that has the lowest validation loss after a budget."""
    rows = [row for row in finished(runs, kind) if row["budget"] == seconds]
    return min(rows, key=lambda row: row["validation_loss"], default=None)


def finished(runs: dict, kind: str | None = None) -> list[dict]:
    """The runs that ended with a loss, but for those that measured a speed."""
    return [
        row
        for row in runs.values()
        if row["budget"] and "validation_loss" in row and kind in (None, row["kind"])
    ]


def has_jumped(runs: dict, row: dict) -> bool:
    """Whether a run ended above a shorter one of the same model: its loss has jumped on the way and
    not come back, so it says nothing of what that time is worth.
    """
    return any(
        row["validation_loss"] > JUMP * other["validation_loss"]
        for other in finished(runs, row["kind"])
        if other["size"] == row["size"] and other["budget"] < row["budget"]
    )


def kinds_of(runs: dict) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in finished(runs)))


def sizes_of(runs: dict, kind: str | None = None) -> list[str]:
    """The sizes, from the fewest parameters to the most."""
    rows = sorted(finished(runs, kind), key=lambda row: row["parameters"])
    return list(dict.fromkeys(row["size"] for row in rows))


def ends_of(runs: dict, kind: str, size: str | None = None) -> list[End]:
    """For each budget the lowest loss of a kind, or of one size of it: the best rate of a sweep."""
    lowest: dict[float, dict] = {}
    for row in finished(runs, kind):
        best = lowest.get(row["budget"], row)
        if size not in (None, row["size"]) or has_jumped(runs, row):
            continue
        if row["validation_loss"] <= best["validation_loss"]:
            lowest[row["budget"]] = row
    ends = [End(r["training_seconds"], r["validation_loss"], r["size"]) for r in lowest.values()]
    return sorted(ends, key=lambda end: end.seconds)


def fit(ends: list[End]) -> Fit | None:
    """None for fewer than three points: two are on a line, whatever they are."""
    if len(ends) < 3:
        return None
    seconds = np.log([end.seconds for end in ends])
    losses = np.log([end.loss for end in ends])
    power, scale = np.polyfit(seconds, losses, 1)
    rest = losses - (scale + power * seconds)
    spread = ((losses - losses.mean()) ** 2).sum()
    r2 = 1 - (rest**2).sum() / spread if spread else 1.0
    worst = np.abs(np.expm1(rest)).max()
    return Fit(float(np.exp(scale)), float(power), float(r2), float(worst), ends)


def loss_at(ends: list[End], seconds: float) -> float | None:
    """The loss of one size after a time, on the lines between its ends, in logarithms; None where a
    line would have to be continued, which is too low: curves flatten.
    """
    times, losses = np.log([e.seconds for e in ends]), np.log([e.loss for e in ends])
    at = math.log(seconds)
    if at < times[0] - 0.1 or at > times[-1] + 0.1:
        return None
    return float(np.exp(np.interp(at, times, losses)))


def write_report(file: Path) -> str:
    """Writes PATH.md and PATH.png beside PATH.json; returns the text."""
    result = json.loads(file.read_text())
    if not longer(result["runs"]):
        return "no run has ended yet but those that measure speeds and learning rates"
    picture = file.with_suffix(".png")
    text = f"{table(result)}\n![Loss by time]({picture.name})\n"
    write_text(file.with_suffix(".md"), text)
    try:
        from model_sizes_figure import draw

        draw(result, picture)
    except ImportError as error:
        text += f"\nno picture: {error}; install it, then: model_sizes_report.py {file}\n"
    return text


def table(result: dict) -> str:
    runs = result["runs"]
    parts = ["# Models of several sizes for equal times"]
    parts += ["## Losses", tables.table(loss_rows(runs), keys=3)]
    parts += [
        "## Which size for how long",
        tables.table(size_rows(runs), keys=2),
        how_sized(result),
    ]
    parts += ["## Where each is better", tables.table(where_rows(runs), keys=2), how_split()]
    parts += ["## Speeds and learning rates", tables.table(rate_rows(result)), notes(result)]
    return "\n\n".join(parts) + "\n"


def longer(runs: dict) -> list[dict]:
    """The runs that follow a sweep: by time, and the best first."""
    rows = [row for row in finished(runs) if "loss" in row]
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


def where_rows(runs: dict) -> list[dict]:
    return [
        {"model": f"{row['kind']} {row['size']}", "s": f"{row['budget']:g}"}
        | {
            f"positions {first} to {end}": f"{np.mean(row['loss_by_position'][first:end]):.3f}"
            for first, end in zip(EDGES, EDGES[1:], strict=False)
            if first < len(row["loss_by_position"])
        }
        | {
            "repeats": kind_cell(row["repeats_loss"]),
            "others": kind_cell(row["others_loss"]),
            "share of repeats": f"{row['repeats_share']:.1%}",
        }
        for row in longer(runs)
    ]


def kind_cell(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def size_rows(runs: dict) -> list[dict]:
    """For several times, which size of each kind has the lowest loss."""
    budgets = {row["budget"] for row in finished(runs)}
    rows = []
    for seconds in sorted(budgets | {2 * budget for budget in budgets}):
        row = {"GPU-hours": f"{seconds / 3600:.4f}", "s": f"{seconds:g}"}
        for kind in kinds_of(runs):
            ends = {size: ends_of(runs, kind, size) for size in sizes_of(runs, kind)}
            losses = {size: loss_at(of_size, seconds) for size, of_size in ends.items()}
            losses = {size: loss for size, loss in losses.items() if loss}
            measured = {
                size: loss
                for size, loss in losses.items()
                if any(abs(end.seconds / seconds - 1) < 0.1 for end in ends[size])
            }
            best = min(measured or losses, key=losses.get, default=None)
            sign = "" if measured else "about "
            row[kind] = f"{best}: {sign}{losses[best]:.3f}" if best else ""
        rows.append(row)
    return [row for row in rows if any(row[kind] for kind in kinds_of(runs))]


def how_sized(result: dict) -> str:
    """What the table of sizes and the lines of the picture are."""
    lines = [
        "Each cell: the size with the lowest validation loss, and that loss. Where no size was "
        "measured so long, it is an estimate (about), on the line between the two nearest ends of "
        "that size's own runs, loss against time in logarithms. A size counts up to its longest "
        "run."
    ]
    for kind in kinds_of(result["runs"]):
        found = fit(ends_of(result["runs"], kind))
        if found:
            lines.append(
                f"{kind}: loss = {found.scale:.3f} x seconds^{found.power:.4f}, by least squares "
                f"of log loss on log time over the lowest ends at {len(found.ends)} times "
                f"({', '.join(f'{end.size}: {end.loss:.3f}' for end in found.ends)}); "
                f"R² {found.r2:.4f}, largest distance {found.worst:.2%}."
            )
    return "\n".join(f"- {line}" for line in lines)


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
    context = settings["model.max_position_embeddings"]
    lines = [diverged_note(result), jumped_note(runs), edge_note(runs), short_note(runs)]
    lines.append(missing_note(result))
    lines += [
        f"{rows[0]['tokens_a_step']:,} tokens a step in samples of {context}, a text of "
        f"{rows[0]['training_tokens'] / 1e6:.1f}M tokens, optimizer "
        f"{settings.get('optim.name', 'adamw')}, one GPU for each run, one run of each.",
        f"Every rate had {plan['sweep_share']:.0%} of the steps of {plan['seconds']:g} s. Longer "
        "runs have the best rate of these, and the next lower one where the table has it. Each "
        "run's learning rate ends its schedule at the last step, so only ends are compared.",
        "Training time is the steps by the median time of a step, without start-up, compilation, "
        "evaluation and saving.",
    ]
    at_once = max(row.get("at_once", 1) for row in rows)
    if at_once > 1:
        lines.append(
            f"Up to {at_once} processes took turns on the GPU: one trained while others started, "
            "which slows short runs: sweeps have losses by steps, and times that may be too long."
        )
    lines.append(
        f"Measured on {origins(result, rows)}. The options of each run are in the JSON file."
    )
    return "\n".join(f"- {line}" for line in lines if line)


def diverged_note(result: dict) -> str:
    """Which runs that follow a sweep have no loss."""
    named = [
        f"{row['kind']} {row['size']} ({row['budget']:g} s, lr {row['lr']:g})"
        for row in result["runs"].values()
        if row["budget"] > sweep_budget(result) and "failure" in row
    ]
    return f"Diverged: {', '.join(named)}." if named else ""


def jumped_note(runs: dict) -> str:
    named = [
        f"{row['kind']} {row['size']} ({row['budget']:g} s, lr {row['lr']:g})"
        for row in longer(runs)
        if has_jumped(runs, row)
    ]
    if not named:
        return ""
    return (
        f"Ended above a shorter run of the same model, as the loss jumped at this rate: "
        f"{', '.join(named)}. Picture, lines and the table of sizes leave it out."
    )


def edge_note(runs: dict) -> str:
    """Which best rates are the lowest or the highest that were tried."""
    tried = {row["lr"] for row in runs.values() if row["budget"]}
    best: dict[tuple, dict] = {}
    for row in longer(runs):  # the best of a time first
        best.setdefault((row["kind"], row["size"], row["budget"]), row)
    at_edge = [
        f"{row['kind']} {row['size']} ({row['budget']:g} s, {row['lr']:g})"
        for row in best.values()
        if len(tried) > 1 and row["lr"] in (min(tried), max(tried))
    ]
    if not at_edge:
        return ""
    return (
        f"The best rate is the lowest or highest that was tried for {', '.join(at_edge)}: rates "
        "beyond may be better."
    )


def short_note(runs: dict) -> str:
    """Which runs are shorter than meant, as the text is."""
    short = [row for row in longer(runs) if row["training_seconds"] < 0.9 * row["budget"]]
    named = [
        f"{row['kind']} {row['size']} ({row['training_seconds']:.0f} of {row['budget']:g} s)"
        for row in short
        if row["passes"] > 3.9
    ]
    if not named:
        return ""
    return f"Stopped before a fifth pass over the text: {', '.join(named)}."


def missing_note(result: dict) -> str:
    """Which runs of the plan are not there."""
    plan, runs = result["plan"], [row for row in result["runs"].values() if row["budget"]]
    not_run, partly = [], []
    for kind, sizes in plan["kinds"].items():
        for size in map(str, sizes):
            own = [row for row in runs if (row["kind"], row["size"]) == (kind, size)]
            if not own:
                not_run.append(f"{kind} {size}")
            elif missing := missing_of(result, own):
                partly.append(f"{kind} {size} ({', '.join(missing)})")
        budgets = {row["budget"] for row in runs if row["kind"] == kind}
        wanted = plan.get("seconds_of_best", []) if budgets else []
        partly += [f"{kind} (not for {time:g} s)" for time in wanted if time not in budgets]
    notes = [f"Not as the plan has it: {'; '.join(partly)}."] if partly else []
    notes += [f"In the plan and not run: {'; '.join(not_run)}."] if not_run else []
    return " ".join(notes)


def missing_of(result: dict, own: list[dict]) -> list[str]:
    """What the plan's sweep and `seconds` lack for the model that has these runs."""
    plan = result["plan"]
    swept = [row for row in own if row["budget"] <= sweep_budget(result)]
    long = [row["lr"] for row in own if row["budget"] == plan["seconds"]]
    untried = [f"{rate:g}" for rate in plan["rates"] if rate not in {row["lr"] for row in swept}]
    missing = [f"no sweep at {', '.join(untried)}"] if untried else []
    if not swept:
        missing = ["no sweep"]
    if not long:
        return [*missing, f"not for {plan['seconds']:g} s"]
    losses = {row["lr"]: row["validation_loss"] for row in swept if "failure" not in row}
    best = min(losses, key=losses.get, default=long[0])
    if best not in long:
        missing.append(f"not for {plan['seconds']:g} s at {best:g}, the best of its sweep")
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="PATH.json of model_sizes.py")
    options = parser.parse_args()
    if not options.results.is_file():
        parser.error(f"{options.results} is not a file; give PATH.json of model_sizes.py")
    print(write_report(options.results))


if __name__ == "__main__":
    run_command(main)
