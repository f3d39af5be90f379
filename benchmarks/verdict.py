"""The tables of README's verdict, from the results of benchmarks/plans/minute.yaml and today.yaml.

    python benchmarks/verdict.py benchmarks/results/minute_512_h200.json \
        benchmarks/results/today_512_h200.json --output PATH

Writes PATH.md. Each row is the mean over the seeds of one model at its best rate; losses are in
nats a token, and compared with those of the transformer after as many seconds.
"""

import re
from pathlib import Path
from statistics import mean

from saving import file_of, markdown, parser_of

from mixer.common.errors import UserError, run_command
from mixer.common.files import read_json, write_text

# By seconds of training: what README calls a model, and its first run. The transformer comes first.
ATTENTION = "attention in some blocks, rich keys 512"
KEYED = "keyed in some blocks, shifted keys 512"
MODELS = {
    60: {
        "Qwen3-style transformer": "Qwen3-style transformer",
        "mixing in the MLP, attention": "attention in 3 of 8 blocks, mixing in the MLP",
        "plain mixing, attention": f"{ATTENTION}, every second of 8, 60 s, lr 0.004",
        "plain mixing, keyed mixing": f"{KEYED}, every second of 8, 60 s, lr 0.004",
        "gated mixing, suffix match": "gated 512, suffix match, 8 blocks, 60 s, lr 0.004",
        "mixing in the MLP, suffix match": "plain, mixing in the MLP",
    },
    300: {
        "Qwen3-style transformer": "Qwen3 512, shifted keys, weight decay 0.1, 300 s, lr 0.002",
        "plain mixing, attention": f"{ATTENTION}, 300 s, lr 0.002",
        "plain mixing, keyed mixing": f"{KEYED}, 300 s, lr 0.002",
        "gated mixing, suffix match": "gated 512, suffix match, 12 blocks, 300 s, lr 0.002",
    },
}
HEAD = ["model", "of its blocks", "window", "parameters, M", "tokens, M", "seconds", "loss"]
HEAD += ["to the transformer", "seeds"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of the results")
    options = parser.parse_args()
    runs = {}
    for file in options.results:
        remedy = "name results of minute.yaml and today.yaml"
        runs |= read_json(file, remedy, required={"runs": {str: dict}})["runs"]
    sections = [f"## {seconds} s\n\n{table(runs, models)}" for seconds, models in MODELS.items()]
    files = " and ".join(f"[{file.name}]({file.name})" for file in options.results)
    source = f"From {files}, which have hardware and commits."
    text = "\n\n".join(["# Models at equal training time: the verdict", *sections, source]) + "\n"
    write_text(file_of(options.output, ".md"), text)
    print(text)


def table(runs: dict[str, dict], models: dict[str, str]) -> str:
    rows, transformer_loss = [], None
    for model, run in models.items():
        seeds = [
            row
            for name, row in runs.items()
            if re.fullmatch(rf"{re.escape(run)}(, seed \d+)?", name) and "validation_loss" in row
        ]
        if not seeds:
            raise UserError(
                f"no run {run!r} has a loss: name results of minute.yaml and today.yaml"
            )
        loss = mean(row["validation_loss"] for row in seeds)
        transformer_loss = transformer_loss or loss
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


def blocks(settings: dict) -> str:
    """How many blocks have queries and keys, of how many."""
    total = settings["model.num_hidden_layers"]
    if settings.get("model.architecture", "mixer") != "mixer":
        return f"attention in {total} of {total}"
    if not settings.get("model.mixer_key_size"):
        return f"no attention, {total}"
    keyed_mixing = "attention" if settings.get("model.mixer_attention") else "keys"
    listed = settings.get("model.mixer_keyed_blocks")
    keyed = len(listed) if listed else total // settings["model.mixer_keyed_every"]
    return f"{keyed_mixing} in {keyed} of {total}"


def window(settings: dict) -> str:
    """How many lags the mixing weights between have."""
    if settings.get("model.architecture", "mixer") != "mixer":
        return "-"
    context = settings["model.max_position_embeddings"]
    return str(settings.get("model.mixing_window") or context)


if __name__ == "__main__":
    run_command(main)
