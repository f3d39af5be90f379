"""The models that a plan has kept: their losses after equal training time, and beside them how fast
they generate.

    python benchmarks/families.py RESULTS.json --output PATH
    python benchmarks/families.py RESULTS.json --output PATH --device cpu --prompt 20 --new 4 \\
        --batches 1,2

RESULTS.json has the runs of benchmarks/plans/families.yaml, or of another plan of `kinds` with
keep_checkpoints. Of each kind the best model is taken, at its best rate. It writes --new tokens
after a prompt of random ones, as benchmarks/generation.py measures it, with a cache that grows and
with a static one; the faster one counts. Writes PATH.json and PATH.md after each model; the same
command leaves out what PATH.json has.
"""

import argparse
import time
from pathlib import Path
from statistics import fmean

import torch
from generation import CACHES, ready, time_generate
from saving import file_of, markdown, measured_by, numbers, origin, parser_of, save

from mixer.checkpoints.pretrained import load_checkpoint
from mixer.common.errors import UserError, first_line, run_command, say_on_stderr
from mixer.common.files import as_path, read_json
from mixer.comparison.report import distinct, finished, repeated
from mixer.reporting.text import LOSS, SECONDS, SPEED

ROW_SHAPE = {"kind": str, "budget": float, str: object}
OF_RUN = ("checkpoint", "lr", "training_seconds", "tokens", "parameters")
SETTINGS = ("prompt", "new", "repeats", "device")


def main() -> None:
    print(table(measure(arguments())))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, help="JSON file of a plan's results")
    parser.add_argument("--prompt", type=int, default=384, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to write")
    parser.add_argument("--batches", type=numbers, default=[1, 256])
    repeats = "calls of generate, of which the median counts"
    parser.add_argument("--repeats", type=int, default=3, help=repeats)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict:
    runs = best_of_kinds(as_path(options.results))
    settings = {name: getattr(options, name) for name in SETTINGS}
    output = file_of(options.output, ".json")
    result = measured_by(options, options.device) | {"settings": settings, "generate": []}
    if output.exists():
        earlier = read_json(output, "give another --output", required={"generate": [dict]})
        if earlier.get("settings") != settings:
            raise UserError(f"{output} has other settings: give those, or another --output")
        if earlier.get("commit") != result["commit"]:
            raise UserError(f"{output} was measured at another commit; give another --output")
        result["generate"] = earlier["generate"]
    result["runs"] = runs
    measured = {(row["model"], row["cache"], row["batch"]) for row in result["generate"]}
    for name, run in runs.items():
        left = [
            (cache, batch)
            for cache in CACHES
            for batch in options.batches
            if cache != "uncached" and (name, cache, batch) not in measured
        ]
        if not left:
            continue
        model, _ = load_checkpoint(as_path(run["checkpoint"]), torch.device("cpu"))
        model = ready(model, options.device)
        for cache, batch in left:
            began = time.perf_counter()
            row = {"model": name, "cache": cache, "batch": batch, "new": options.new}
            try:
                row |= time_generate(model, batch, options.new, CACHES[cache], options)
            except (RuntimeError, ValueError) as error:  # of the compiler, of a static cache
                row["failure"] = first_line(error)
            print(f"{name}, {cache}, {batch}: {time.perf_counter() - began:.1f} s", flush=True)
            result["generate"].append(row)
            save(result, table(result), options.output)
    save(result, table(result), options.output)  # with the losses of runs that are new
    return result


def best_of_kinds(file: Path) -> dict[str, dict]:
    """By kind, what the table has of its run of the lowest loss, and the mean loss of its seeds.
    Says of which kinds no run has a loss: they are left out.
    """
    remedy = "name the results of a plan of kinds"
    results = read_json(file, remedy, required={"runs": {str: ROW_SHAPE}})
    runs = results["runs"]
    seeds = repeated(runs)
    best = {}
    for kind in distinct(row["kind"] for row in runs.values()):
        ended = finished(runs, kind)
        losses_by_run = {
            name: row["validation_loss"]
            for name, row in runs.items()
            if row in ended and "checkpoint" in row
        }
        if not losses_by_run:
            say_on_stderr(f"{kind} is left out: no run of it has a loss and a checkpoint")
            continue
        name = min(losses_by_run, key=losses_by_run.__getitem__)
        run = runs[name]
        losses = [row["validation_loss"] for row in seeds.get(name, [run])]
        best[kind] = {"loss": fmean(losses), "seeds": len(losses)}
        best[kind] |= {key: run[key] for key in OF_RUN}
    if not best:
        problem = "has no checkpoint of a run that ended with a loss"
        raise UserError(f"{file} {problem}: give the plan keep_checkpoints: true")
    return dict(sorted(best.items(), key=lambda item: -item[1]["loss"]))


def table(result: dict) -> str:
    batches = list(dict.fromkeys(row["batch"] for row in result["generate"]))
    head = ["model", "loss", "seeds", "lr", "training, s", "tokens, M", "parameters, M"]
    for batch in batches:
        head += [f"tokens/s, batch {batch}", "cache"]
    rows = []
    for name, run in result["runs"].items():
        cells = [name, f"{run['loss']:{LOSS}}", str(run["seeds"]), f"{run['lr']:g}"]
        cells += [f"{run['training_seconds']:{SECONDS}}", f"{run['tokens'] / 1e6:.0f}"]
        cells.append(f"{run['parameters'] / 1e6:.1f}")
        for batch in batches:
            speeds = {
                row["cache"]: row["tokens_per_second"]
                for row in result["generate"]
                if (row["model"], row["batch"]) == (name, batch)
                and row.get("tokens_per_second", 0) > 0  # nan where memory was too little
            }
            fastest = max(speeds, key=speeds.__getitem__, default="")
            cells += [f"{speeds[fastest]:{SPEED}}", fastest] if speeds else ["-", "-"]
        rows.append(cells)
    settings = result["settings"]
    note = (
        "Losses are those of validation, nats per token, the mean of the seeds. A token after the "
        f"first, greedy, bfloat16, after prompts of {settings['prompt']} tokens; the median of "
        f"{settings['repeats']} calls with the faster cache. `-`: failed, or not measured yet."
    )
    title = "# Losses after equal time, and speed of generation"
    return "\n\n".join([title, markdown(head, rows), note, f"Measured on {origin(result)}."]) + "\n"


if __name__ == "__main__":
    run_command(main)
