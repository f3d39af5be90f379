"""The tables of README's verdict, from the results of several plans, and when a mixer has the loss
that the transformer ends five minutes with.

    python benchmarks/verdict.py --output benchmarks/results/verdict_512_h200

Writes PATH.md. Each row is the mean over the seeds of one model at its best rate; losses are in
nats a token, and compared with that of the transformer above.
"""

import math
import re
from pathlib import Path
from statistics import mean

from saving import file_of, markdown, parser_of

from mixer.common.errors import UserError, run_command
from mixer.common.files import read_json, write_text

RESULTS = Path(__file__).parent / "results"
ATTENTION = "attention in some blocks, rich keys 512"
KEYED = "keyed in some blocks, shifted keys 512"
TRANSFORMER = "Qwen3-style transformer"
IN_MLP = "attention in 3 of 8 blocks, mixing in the MLP"
UNMIXED = "attention in 3 of 8 blocks, no mixing between"
WIDE = "attention in 2 of 5 wide blocks, mixing in the MLP"
FIVE_MINUTES = "five_minutes_512_h200"
DEEP = "attention in 5 of 16 blocks, mixing in the MLP"
ENTRANTS = "families_512_h200"
SHORTER = f"{DEEP}, 200 s"
# By title: what README calls a model, its file of results, and its first run, or its kind in a plan
# of kinds.
TABLES = {
    "Books, 60 s": {
        "Qwen3-style transformer": ("minute_512_h200", TRANSFORMER),
        "mixing in the MLP + attention": ("minute_512_h200", f"{IN_MLP}, window 8"),
        "the same, window 4, another host": ("minute_512_h200", IN_MLP),
        "the same without mixing, another host": ("minute_512_h200", UNMIXED),
        "plain mixing + attention": (
            "today_512_h200",
            f"{ATTENTION}, every second of 8, 60 s, lr 0.004",
        ),
        "plain mixing + keyed mixing": (
            "today_512_h200",
            f"{KEYED}, every second of 8, 60 s, lr 0.004",
        ),
        "gated mixing + suffix match": (
            "today_512_h200",
            "gated 512, suffix match, 8 blocks, 60 s, lr 0.004",
        ),
        "mixing in the MLP + suffix match": ("minute_512_h200", "plain, mixing in the MLP"),
        "LFM2-style": (ENTRANTS, "LFM2-style"),
        "recurrent mixer": (ENTRANTS, "recurrent mixer"),
    },
    "Books, 300 s": {
        "Qwen3-style transformer": (FIVE_MINUTES, TRANSFORMER),
        "the same, 10 wide blocks, another host": (FIVE_MINUTES, f"{TRANSFORMER}, 10 wide blocks"),
        "plain mixing + attention": ("today_512_h200", f"{ATTENTION}, 300 s, lr 0.002"),
        "mixing in the MLP + attention": (FIVE_MINUTES, DEEP),
        "plain mixing + keyed mixing": ("today_512_h200", f"{KEYED}, 300 s, lr 0.002"),
        "gated mixing + suffix match": (
            "today_512_h200",
            "gated 512, suffix match, 12 blocks, 300 s, lr 0.002",
        ),
    },
    "Code, 60 s": {
        "code: Qwen3-style transformer": ("minute_code_512_h200", TRANSFORMER),
        "code: mixing in the MLP + attention": ("minute_code_512_h200", f"{IN_MLP}, window 8"),
        "code: plain mixing + keyed mixing": ("families_code_512_h200", "keyed mixer"),
        "code: LFM2-style": ("families_code_512_h200", "LFM2-style"),
        "code: gated mixing + suffix match": (
            "families_code_512_h200",
            "gated mixer, suffix match",
        ),
        "code: recurrent mixer": ("families_code_512_h200", "recurrent mixer"),
    },
    "Books at 2048 tokens, 60 s": {
        "context 2048: Qwen3-style transformer": ("minute_2048_h200", TRANSFORMER),
        "context 2048: mixing in the MLP + attention": ("minute_2048_h200", WIDE),
        "context 2048: LFM2-style": ("families_2048_h200", "LFM2-style"),
        "context 2048: plain mixing + keyed mixing": ("families_2048_h200", "keyed mixer"),
        "context 2048: gated mixing + suffix match": (
            "families_2048_h200",
            "gated mixer, suffix match",
        ),
        "context 2048: recurrent mixer": ("families_2048_h200", "recurrent mixer"),
    },
}
HEAD = ["model", "blocks with attention", "window", "parameters, M", "tokens, M", "seconds", "loss"]
HEAD += ["to the transformer", "seeds"]


def main() -> None:
    options = parser_of(__doc__).parse_args()
    results = read_results()
    sections = [f"## {title}\n\n{table(models, results)}" for title, models in TABLES.items()]
    sections.append(f"## Time to the transformer's loss\n\n{race(results[FIVE_MINUTES]['runs'])}")
    listed = ", ".join(f"[{file}.json]({file}.json)" for file in results)
    source = f"From {listed}, which have hardware and commits."
    text = "\n\n".join(["# Models at equal training time: the verdict", *sections, source]) + "\n"
    write_text(file_of(options.output, ".md"), text)
    print(text)


def read_results() -> dict[str, dict]:
    """The results that the tables are made of, by the names of their files."""
    files = dict.fromkeys(file for models in TABLES.values() for file, _ in models.values())
    required = {"runs": {str: dict}}
    return {file: read_json(RESULTS / f"{file}.json", "keep it", required) for file in files}


def seeds_of(run: str, file: str, results: dict[str, dict]) -> list[dict]:
    """The rows of a run, or of the best run of a kind, one for each seed."""
    runs = results[file]["runs"]
    names = seed_names(run, runs)
    if not names:
        raise UserError(f"no run {run!r} of {file}.json has a loss: train it again")
    return [runs[name] for name in names]


def seed_names(run: str, runs: dict[str, dict]) -> list[str]:
    """The names of a run, or of the best run of a kind, that have a loss: one for each seed."""
    of_kind = [
        name
        for name, row in runs.items()
        if row.get("kind") == run and row["budget"] and "validation_loss" in row
    ]
    if of_kind:
        longest = max(runs[name]["budget"] for name in of_kind)
        ended = [n for n in of_kind if runs[n]["budget"] == longest and "seed" not in runs[n]]
        run = min(ended, key=lambda name: runs[name]["validation_loss"], default=run)
    return [
        name
        for name, row in runs.items()
        if re.fullmatch(rf"{re.escape(run)}(, seed \d+)?", name) and "validation_loss" in row
    ]


def table(models: dict[str, tuple[str, str]], results: dict[str, dict]) -> str:
    rows = []
    transformer_loss = math.nan  # of the last transformer so far
    for model, (file, run) in models.items():
        seeds = seeds_of(run, file, results)
        loss = mean(row["validation_loss"] for row in seeds)
        if TRANSFORMER in model:
            transformer_loss = loss
        rows.append(
            [
                model,
                blocks(seeds[0]["settings"]),
                window(seeds[0]["settings"]),
                f"{seeds[0]['parameters'] / 1e6:.1f}",
                f"{seeds[0]['tokens'] / 1e6:.0f}",
                f"{mean(row['training_seconds'] for row in seeds):.1f}",
                f"{loss:.4f}",
                f"{loss - transformer_loss:+.3f}",
                str(len(seeds)),
            ]
        )
    return markdown(HEAD, rows)


def race(runs: dict[str, dict]) -> str:
    """When the mixer has the transformer's loss, between two runs of it whose learning rates fall
    to their ends; the loss is taken to fall with the logarithm of the time.
    """
    shorter, longer, transformer = runs[SHORTER], runs[DEEP], runs[TRANSFORMER]
    gain = shorter["validation_loss"] - longer["validation_loss"]
    slope = gain / math.log(longer["training_seconds"] / shorter["training_seconds"])
    behind = transformer["validation_loss"] - longer["validation_loss"]
    seconds = longer["training_seconds"] / math.exp(behind / slope)
    share = seconds / transformer["training_seconds"]
    ends = [
        f"{run['training_seconds']:.0f} s at {run['validation_loss']:.4f} "
        f"({run['tokens_per_second'] / 1e6:.2f}M tokens/s)"
        for run in (shorter, longer)
    ]
    return (
        f"On books, mixing in the MLP with attention ends {' and '.join(ends)}. Interpolated, it "
        f"has the loss that the transformer has after {transformer['training_seconds']:.0f} s, "
        f"{transformer['validation_loss']:.4f}, after {seconds:.0f} s: {share:.2f} of the time "
        "(one seed)."
    )


def blocks(settings: dict) -> str:
    """How many blocks have attention or keyed mixing, of how many."""
    architecture = settings.get("model.architecture", "masked_mixer")
    if architecture == "auto":
        layers = settings["model.config"]["layer_types"]
        return f"{layers.count('full_attention')} of {len(layers)}"
    total = settings["model.num_hidden_layers"]
    if architecture != "masked_mixer":
        return f"{total} of {total}"
    if not settings.get("model.mixer_key_size"):
        return f"none of {total}"
    listed = settings.get("model.mixer_keyed_blocks")
    number = len(listed) if listed else total // settings["model.mixer_keyed_every"]
    keyed = "" if settings.get("model.mixer_attention") else " (keyed)"
    return f"{number} of {total}{keyed}"


def window(settings: dict) -> str:
    """How many lags the mixing weights between have."""
    if settings.get("model.architecture", "masked_mixer") != "masked_mixer":
        return "-"
    context = settings["model.max_position_embeddings"]
    return str(settings.get("model.mixing_window") or context)


if __name__ == "__main__":
    run_command(main)
