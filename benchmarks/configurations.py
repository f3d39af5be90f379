"""What each configuration of README needs, measured; and what larger models will need, estimated.

    python benchmarks/configurations.py --output benchmarks/results/configurations_h200

Writes PATH.md, from results of other benchmarks and from the estimate that a run prints before its
first step. Memory is the most that PyTorch reserved, or in older runs (recipe, h200) used, in units
of 2^30 bytes; the time is that of all steps on one GPU at the measured speed; the loss, where a run
had as many steps, is the mean of its seeds.
"""

from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import torch
from saving import file_of, markdown, parser_of
from several_gpus import FLAT, LARGE
from verdict import seeds_of

from mixer.common.errors import run_command
from mixer.common.files import read_json, write_text
from mixer.common.hardware import ROOT
from mixer.models.architecture import model_config, new_model
from mixer.reporting.text import LOSS
from mixer.training.config import RunConfig, load_config
from mixer.training.estimate import needed_gb

RESULTS = Path(__file__).parent / "results"
# The file of results and the run of each file in configs/.
RUNS = {
    "attention": ("minute_512_h200", "attention in 3 of 8 blocks, mixing in the MLP, window 8"),
    "no_attention": ("minute_512_h200", "plain, mixing in the MLP"),
    "keyed": ("today_512_h200", "keyed in some blocks, shifted keys 512, 300 s, lr 0.002"),
    "recipe": ("recipe_512_h200", "recipe, 480 steps"),
    "h200": ("recipe_512_h200", "paper"),
}
HEAD = ["configuration", "parameters, M", "memory, GB", "tokens, M", "PFLOP", "minutes"]
HEAD += ["loss on books"]
# Larger models of the recipe: hidden size and blocks. And on how many GPUs.
SIZES = ((1024, 16), (2048, 16), (2048, 24), (3072, 24), (4096, 24), (4096, 48))
GPUS = (1, 2, 4, 8)
FIT_HEAD = ["hidden size x blocks", "parameters, M", "1 GPU", "2 GPUs", "4 GPUs", "8 GPUs"]
SAMPLES = 32  # a GPU, of 512 tokens
DATA = SimpleNamespace(vocab_size=8000, eos_token_id=0)
# Rows of several_gpus_h200.json, with the options of their models.
ROWS = {
    "speed flat 32, 1, round 1": FLAT,
    "speed flat 128, 1, round 1": FLAT,
    "fsdp DDP, two GPUs' host": LARGE,
    "fsdp FSDP, two GPUs' host": LARGE,
    "fsdp FSDP, round 1": LARGE,
}
BESIDE_HEAD = [
    "model",
    "samples a GPU",
    "GPUs",
    "measured, GB",
    "estimate, GB",
    "measured / estimate",
]


def main() -> None:
    options = parser_of(__doc__).parse_args()
    files = dict.fromkeys(file for file, _ in RUNS.values())
    sources = ", ".join(f"[{file}.json]({file}.json)" for file in files)
    sections = [
        "# Configurations",
        markdown(HEAD, measured_rows()),
        f"From {sources}, which have hardware and commits. Minutes and useful PFLOP are of all the "
        "configuration's steps, at the speed of these runs; `-`: they had fewer steps.",
        "## What fits",
        markdown(FIT_HEAD, estimated_rows()),
        "GB of each GPU, by the estimate: configs/recipe.yaml in other sizes, one GPU or FSDP on "
        f"several, {SAMPLES} samples of 512 tokens a GPU.",
        "## The estimate beside what was measured",
        markdown(BESIDE_HEAD, rows_beside()),
        "The first rows are of the files above, the others of "
        "[several_gpus_h200.json](several_gpus_h200.json).",
    ]
    text = "\n\n".join(sections) + "\n"
    write_text(file_of(options.output, ".md"), text)
    print(text)


def measured_rows() -> list[list[str]]:
    rows = []
    for configuration, (file, name) in RUNS.items():
        results = {file: read_json(RESULTS / f"{file}.json", "keep the results")}
        seeds = seeds_of(name, file, results)
        measured = seeds[0]
        run = load_config(str(ROOT / f"configs/{configuration}.yaml"), [])
        tokens = run.train.steps * run.train.batch_size * run.model.max_position_embeddings
        seconds = tokens / measured["tokens_per_second"]
        loss = fmean(row["validation_loss"] for row in seeds)
        rows.append(
            [
                configuration,
                f"{measured['parameters'] / 1e6:.1f}",
                f"{measured['peak_memory_gb']:.1f}",
                f"{tokens / 1e6:,.0f}",
                f"{seconds * measured['useful_tflops'] / 1e3:,.0f}",
                f"{seconds / 60:,.0f}",
                f"{loss:{LOSS}}" if tokens == measured["tokens"] else "-",
            ]
        )
    return rows


def estimated_rows() -> list[list[str]]:
    rows = []
    for hidden_size, blocks in SIZES:
        options = [f"model.hidden_size={hidden_size}", f"model.num_hidden_layers={blocks}"]
        options.append(f"train.batch_size={SAMPLES}")
        run = load_config(str(ROOT / "configs/recipe.yaml"), options)
        needs = [f"{estimate_gb(run, count, is_sharded=count > 1):.0f}" for count in GPUS]
        rows.append([f"{hidden_size} x {blocks}", f"{parameters(run) / 1e6:,.0f}", *needs])
    return rows


def rows_beside() -> list[list[str]]:
    rows = []
    for configuration, (file, name) in RUNS.items():
        measured = read_json(RESULTS / f"{file}.json", "keep the results")["runs"][name]
        run = load_config(str(ROOT / f"configs/{configuration}.yaml"), [])
        rows.append(row_beside(configuration, run, 1, measured, is_sharded=False))
    measured_rows = read_json(RESULTS / "several_gpus_h200.json", "keep the results")["rows"]
    for name, (_, config, *options) in ROWS.items():
        row = measured_rows[name]
        run = load_config(str(ROOT / config), [*options, f"train.batch_size={row['samples']}"])
        rows.append(row_beside(row["model"], run, row["gpus"], row, is_sharded="FSDP" in name))
    return rows


def row_beside(
    model: str, run: RunConfig, count: int, measured: dict, is_sharded: bool
) -> list[str]:
    measured_gb = measured["peak_memory_gb"]
    estimate = estimate_gb(run, count, is_sharded)
    sizes = [f"{measured_gb:.1f}", f"{estimate:.1f}", f"{measured_gb / estimate:.2f}"]
    return [model, str(run.train.batch_size), str(count), *sizes]


def estimate_gb(run: RunConfig, count: int, is_sharded: bool) -> float:
    world = SimpleNamespace(device=torch.device("cuda"), size=count, is_sharded=is_sharded)
    return needed_gb(run, DATA, world)


def parameters(run: RunConfig) -> int:
    with torch.device("meta"):
        model = new_model(model_config(run.model, DATA.vocab_size, DATA.eos_token_id))
    return model.num_parameters()


if __name__ == "__main__":
    run_command(main)
