"""How training scales over GPUs: tokens/s on several against so many times one, by real runs of
train.py.

    python benchmarks/scaling.py --config configs/v100.yaml --processes 1,2,4 --output PATH \\
        [section.key=value ...]

Each GPU gets `train.batch_size` samples a step, whatever their number. Runs of DDP and FSDP, in
fp16 and bf16, take turns for `--repeats` rounds; the tokens/s of a round, and the share of its time
that it waits for data, are the medians of its windows of logged steps after the first, which holds
the start. PATH.json (rows, hardware, commit) and PATH.md are written anew after each run.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from saving import add_options, measured_by, origin, save

from mixer.common.errors import UserError, run_command
from mixer.common.provenance import ROOT
from mixer.reporting.metrics_file import read_metrics

ENGINES = {"ddp": "configs/accelerate/1x8.yaml", "fsdp": "configs/accelerate/1x8_fsdp.yaml"}
WINDOWS = 5
MEASURED = ("tokens_per_second", "data_wait_share")  # of a window, as the metrics have them


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    add_options(parser)
    parser.add_argument(
        "--processes",
        default="1,2",
        help="numbers of GPUs; 1 among them, for the others are compared with it",
    )
    parser.add_argument("--engines", default="ddp,fsdp")
    parser.add_argument("--precisions", default="bf16,fp16")
    parser.add_argument("--window", type=int, default=20, help="steps between two logged ones")
    parser.add_argument("--repeats", type=int, default=2)
    options, overrides = parser.parse_known_args()
    counts = sorted(map(int, options.processes.split(",")))
    devices = torch.cuda.device_count()
    if counts[0] != 1 or (devices and counts[-1] > devices):
        raise UserError(
            f"--processes {options.processes}; allowed: 1 and other numbers, up to the {devices} "
            "GPUs that are here"
        )
    unknown = set(options.engines.split(",")) - ENGINES.keys()
    if unknown:
        raise UserError(f"--engines has {', '.join(unknown)}; allowed: {', '.join(ENGINES)}")

    # One process needs no engine: its run is what all engines are compared with, and the first of
    # its precision.
    several = [(count, engine) for count in counts[1:] for engine in options.engines.split(",")]
    cases = [
        (precision, *case)
        for precision in options.precisions.split(",")
        for case in [(1, ""), *several]
    ]
    rounds = {case: [] for case in cases}
    result = measured_by(options)
    for _ in range(options.repeats):
        for case in cases:
            rounds[case].append(measure(options.config, overrides, *case, options.window))
            speed, waiting = (rounds[case][-1][name] for name in MEASURED)
            print(*case, f"{speed:,.0f} tokens/s, {waiting:.2%} waiting for data", flush=True)
            result["rows"] = [row(case, rounds) for case in cases if rounds[case]]
            result["not_run"] = [
                " ".join(map(str, case)).strip() for case in cases if not rounds[case]
            ]
            save(result, table(result), options.output)
    print(table(result))


def measure(
    config: str, overrides: list[str], precision: str, count: int, engine: str, window: int
) -> dict[str, float]:
    """MEASURED of one run: the tokens/s of all processes together."""
    launch = [sys.executable]
    if count > 1:
        accelerate = str(Path(sys.executable).with_name("accelerate"))
        launch = [
            accelerate,
            "launch",
            "--config_file",
            ENGINES[engine],
            "--num_processes",
            str(count),
        ]
        launch += [] if torch.cuda.is_available() else ["--cpu"]
    with tempfile.TemporaryDirectory() as directory:
        settings = [
            f"train.mixed_precision={precision}",
            f"train.steps={window * (WINDOWS + 1)}",
            "train.eval_every=0",
        ]
        settings += [
            f"logging.log_every={window}",
            "logging.tracker=none",
            "checkpoint.save_every=0",
        ]
        settings += [
            f"output_dir={directory}",
            "name=scaling",
            "train.eval_samples=8",
            "optim.warmup_steps=1",
        ]
        settings += ["checkpoint.save_last=false"]
        command = [*launch, "train.py", "--config", config, *overrides, *settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise UserError(
                f"a run failed: {' '.join(command)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
            )
        lines = [
            line
            for line in read_metrics(Path(directory) / "scaling" / "metrics.jsonl")
            if "loss" in line
        ]
    return {name: statistics.median(line[name] for line in lines[1:]) for name in MEASURED}


def row(case: tuple, rounds: dict[tuple, list[dict]]) -> dict:
    """A case's speeds, and its share of perfect scaling: the median over the rounds of the share in
    each.
    """
    precision, count, engine = case
    alone = rounds[precision, 1, ""]  # comes first
    measured = {name: [one[name] for one in rounds[case]] for name in MEASURED}
    pairs = zip(rounds[case], alone, strict=False)
    shares = [ours["tokens_per_second"] / (count * one["tokens_per_second"]) for ours, one in pairs]
    found = {"precision": precision, "gpus": count, "engine": engine} | measured
    return found | {"shares": shares, "share": statistics.median(shares)}


def table(result: dict) -> str:
    lines = [
        "| precision | GPUs | engine | tokens/s | share of perfect scaling | over the rounds | "
        "waiting for data |",
        "|---|---:|---|---:|---:|---|---:|",
    ]
    for row in result["rows"]:
        speed, spread = (
            statistics.median(row["tokens_per_second"]),
            f"{min(row['shares']):.3f} to {max(row['shares']):.3f}",
        )
        lines.append(
            f"| {row['precision']} | {row['gpus']} | {row['engine'] or '-'} | {speed:,.0f} | "
            f"{row['share']:.3f} | {spread} | {statistics.median(row['data_wait_share']):.2%} |"
        )
    lines += (
        [f"\nEnded before these were run: {'; '.join(result['not_run'])}."]
        if result["not_run"]
        else []
    )
    return "\n".join(lines) + f"\n\nMeasured on {origin(result)}.\n"


if __name__ == "__main__":
    run_command(main)
