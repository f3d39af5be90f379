"""How fast the verdict's models generate, beside their losses after a minute of books.

    python benchmarks/families.py --output PATH
    python benchmarks/families.py --output PATH --device cpu --prompt 20 --new 4 --batches 1,2

Models are those of benchmarks/verdict.py, with random weights, as speed does not depend on them. Of
the transformer it is the one without shifted keys, which has a cache. Each writes --new tokens
after a prompt of random ones, as benchmarks/generation.py measures it, with a cache that grows and
with a static one; the faster one counts. Writes PATH.json and PATH.md (a table).
"""

import argparse
import time
from statistics import fmean

import torch
from generation import CACHES, ready, time_generate
from saving import markdown, measured_by, numbers, origin, parser_of, save
from transformers import PreTrainedModel
from verdict import TABLES, read_results, seeds_of

from mixer.common.errors import first_line, run_command
from mixer.models.architecture import model_config, new_model
from mixer.reporting.text import LOSS, SPEED
from mixer.training.config import load_config

OF_A_MINUTE = TABLES["Books, 60 s"]
# Forms of the row above them generate alike.
MODELS = {name: run for name, run in OF_A_MINUTE.items() if not name.startswith("the same")}
END_OF_TEXT = 0


def main() -> None:
    print(table(measure(arguments())))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompt", type=int, default=384, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to write")
    parser.add_argument("--batches", type=numbers, default=[1, 256])
    repeats = "calls of generate, of which the median counts"
    parser.add_argument("--repeats", type=int, default=3, help=repeats)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict:
    settings = {name: getattr(options, name) for name in ("prompt", "new", "repeats")}
    result = measured_by(options, options.device) | {"settings": settings}
    result |= {"models": {}, "generate": []}
    results = read_results()
    for name, (file, run) in MODELS.items():
        seeds = seeds_of(run, file, results)
        result["models"][name] = {
            "loss": fmean(row["validation_loss"] for row in seeds),
            "seeds": len(seeds),
            "parameters": seeds[0]["parameters"],
        }
        model = ready(build(seeds[0]["settings"]), options.device)
        for cache in CACHES:
            if cache == "uncached":
                continue
            for batch in options.batches:
                began = time.perf_counter()
                row = {"model": name, "cache": cache, "batch": batch, "new": options.new}
                try:
                    row |= time_generate(model, batch, options.new, CACHES[cache], options)
                except (RuntimeError, ValueError) as error:  # of the compiler, of a static cache
                    row["failure"] = first_line(error)
                print(f"{name}, {cache}, {batch}: {time.perf_counter() - began:.1f} s", flush=True)
                result["generate"].append(row)
                save(result, table(result), options.output)
    return result


def build(settings: dict) -> PreTrainedModel:
    """The model that a run trained, with random weights. settings: by section.key."""
    settings = {key: value for key, value in settings.items() if key.startswith("model.")}
    if settings.get("model.architecture") == "shifted_qwen3":
        settings["model.architecture"] = "qwen3"
    run = load_config(None, ["name=built", "train.steps=1"], settings)
    return new_model(model_config(run.model, run.data.vocab_size, END_OF_TEXT))


def table(result: dict) -> str:
    """Everything as Markdown."""
    batches = list(dict.fromkeys(row["batch"] for row in result["generate"]))
    head = ["model", "loss", "seeds", "parameters, M"]
    for batch in batches:
        head += [f"tokens/s, batch {batch}", f"MB, batch {batch}"]
    rows = []
    for name, model in result["models"].items():
        cells = [name, f"{model['loss']:{LOSS}}", str(model["seeds"])]
        cells.append(f"{model['parameters'] / 1e6:.1f}")
        for batch in batches:
            measured = [
                row
                for row in result["generate"]
                if (row["model"], row["batch"]) == (name, batch)
                and row.get("tokens_per_second", 0) > 0  # nan where memory was too little
            ]
            if measured:
                fastest = max(measured, key=lambda row: row["tokens_per_second"])
                cells += [f"{fastest['tokens_per_second']:{SPEED}}", f"{fastest['long_mb']:,.0f}"]
            else:
                cells += ["-", "-"]
        rows.append(cells)
    settings = result["settings"]
    note = (
        "Losses are those after a minute of books, nats per token, means of the seeds. A token "
        f"after the first, greedy, bfloat16, after prompts of {settings['prompt']} tokens; the "
        f"median of {settings['repeats']} calls, with the faster of a growing and a static cache. "
        "Memory is the most that a call takes after its first token, beside the weights. `-`: "
        "failed."
    )
    title = "# Losses after equal time, and speed of generation"
    return "\n\n".join([title, markdown(head, rows), note, f"Measured on {origin(result)}."]) + "\n"


if __name__ == "__main__":
    run_command(main)
