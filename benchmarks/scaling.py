"""How training scales over the GPUs of one host: tokens/s on several against so many times one, by
real runs of train.py with DDP.

    python benchmarks/scaling.py --output PATH [--processes 1,2,4,8] [--models flat,keyed] \\
        [--samples 32,128] [--repeats 3] [section.key=value ...]

Each GPU gets `--samples` samples of 512 tokens a step, whatever the number of GPUs. The runs take
turns for `--repeats` rounds. A run's tokens/s, and the share of its time that it waits for data,
are medians of its windows of logged steps after the first, which holds the start. PATH.json (rows,
hardware, commit) and PATH.md are written anew after each run.
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from saving import markdown, measured_by, names, numbers, origin, parser_of, save

from mixer.common.errors import UserError, run_command
from mixer.common.provenance import ROOT
from mixer.reporting.metrics_file import read_metrics

QWEN3 = ["model.architecture=qwen3", "model.hidden_size=512", "model.num_attention_heads=4"]
# The text of configs/comparison.yaml, which is on every machine.
TEXT = [
    "data.source=builtin",
    "data.path=",
    "data.subset=packages",
    "data.directory=data/comparison",
]
TEXT += ["data.max_documents=5200", "data.validation_fraction=0.02"]
MODELS = {  # by name: configuration and overrides
    "flat": ["configs/comparison.yaml"],
    "keyed": ["configs/keyed.yaml", *TEXT],
    "qwen3": ["configs/comparison.yaml", *QWEN3],
}
WINDOWS = 5
MEASURED = ("tokens_per_second", "data_wait_share")  # of a window, as the metrics have them


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    devices = torch.cuda.device_count()
    counts = [1, *(count for count in (2, 4, 8) if count <= devices)]
    add("--processes", type=numbers, default=counts, help="numbers of GPUs, 1 among them")
    add("--models", type=names, default=[*MODELS], help=f"some of {', '.join(MODELS)}")
    add("--samples", type=numbers, default=[32, 128], help="samples of a GPU's step")
    add("--precision", default="bf16")
    add("--window", type=int, default=20, help="steps between two logged ones")
    add("--repeats", type=int, default=3)
    options, overrides = parser.parse_known_args()
    options.processes.sort()
    if unknown := set(options.models) - MODELS.keys():
        raise UserError(f"--models has {', '.join(unknown)}; allowed: {', '.join(MODELS)}")
    if options.processes[0] != 1 or (devices and options.processes[-1] > devices):
        raise UserError(
            f"--processes {options.processes}; allowed: 1 and other numbers, up to the {devices} "
            "GPUs that are here"
        )
    cases = list(itertools.product(options.models, options.samples, options.processes))
    rounds: dict[tuple, list[dict]] = {case: [] for case in cases}
    result = measured_by(options)
    for _, case in itertools.product(range(options.repeats), cases):
        rounds[case].append(measure(*case, options, overrides))
        print(*case, rounds[case][-1], flush=True)
        result["rows"] = [row(case, rounds) for case in cases if rounds[case]]
        save(result, table(result), options.output)
    print(table(result))


def measure(model: str, samples: int, count: int, options, overrides: list[str]) -> dict:
    """MEASURED of one run: the tokens/s of all processes together."""
    config, *settings = MODELS[model]
    settings += [f"train.batch_size={samples}", f"train.mixed_precision={options.precision}"]
    settings += ["model.max_position_embeddings=512", *overrides]
    settings += [f"train.steps={options.window * (WINDOWS + 1)}", "optim.warmup_steps=1"]
    settings += [f"logging.log_every={options.window}", "logging.tracker=none"]
    settings += ["train.eval_every=0", "train.eval_samples=8"]
    settings += ["checkpoint.save_every=0", "checkpoint.save_last=false", "name=scaling"]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *(launch if count > 1 else []), "train.py", "--config", config]
        command += [*settings, f"output_dir={directory}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            said = done.stdout[-1000:] + done.stderr[-3000:]
            raise UserError(f"a run failed: {' '.join(command)}\n{said}")
        lines = read_metrics(Path(directory) / "scaling" / "metrics.jsonl")
    windows = [line for line in lines if "loss" in line][1:]
    return {name: statistics.median(line[name] for line in windows) for name in MEASURED}


def row(case: tuple, rounds: dict[tuple, list[dict]]) -> dict:
    """A case's speeds, and its share of perfect scaling in each round."""
    model, samples, count = case
    pairs = zip(rounds[case], rounds[model, samples, 1], strict=False)
    shares = [ours["tokens_per_second"] / (count * one["tokens_per_second"]) for ours, one in pairs]
    found = {"model": model, "samples": samples, "gpus": count, "shares": shares}
    return found | {name: [one[name] for one in rounds[case]] for name in MEASURED}


def table(result: dict) -> str:
    head = ["model", "tokens a GPU", "GPUs", "tokens/s", "share of perfect scaling"]
    rows = []
    for one in result["rows"]:
        speed, share, waiting = (
            statistics.median(one[key]) for key in ("tokens_per_second", "shares", MEASURED[1])
        )
        cells = [one["model"], f"{one['samples']} x 512", str(one["gpus"]), f"{speed:,.0f}"]
        apart = f"{min(one['shares']):.3f} to {max(one['shares']):.3f}"
        rows.append([*cells, f"{share:.3f}", apart, f"{waiting:.2%}"])
    lines = markdown([*head, "over the rounds", "waiting for data"], rows)
    return f"{lines}\n\nMeasured on {origin(result)}.\n"


if __name__ == "__main__":
    run_command(main)
