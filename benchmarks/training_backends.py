"""The switch, measured: the same run under several mixing backends, losses compared at every logged step.

    python benchmarks/training_backends.py --config configs/h200.yaml --output PATH [section.key=value ...]

Writes PATH_<backend>.jsonl (each run's metrics), PATH.json (hardware, commit, gaps, throughput) and PATH.md (a table).
Each backend trains
in a process of its own, from the same seed, so from the same weights and on the same data in the same order.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from mixer.report import read_metrics

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--output", required=True, help="path of the results without ending")
    parser.add_argument("--backends", default="cuda,dense", help="the first is compared with each other one")
    parser.add_argument("--commit", default="", help="commit that is measured; by default what git says")
    options, overrides = parser.parse_known_args()
    names = options.backends.split(",")
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    runs = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            train(options.config, overrides, name, directory)
            metrics = output.with_name(f"{output.name}_{name}.jsonl")
            shutil.copy(Path(directory) / name / "metrics.jsonl", metrics)
            runs[name] = read_metrics(metrics)
    result = {"hardware": hardware(), "commit": options.commit or commit(), "command": " ".join(sys.argv)}
    result["backends"] = {name: summary(lines) for name, lines in runs.items()}
    result["gaps"] = {f"{names[0]} vs {other}": gap(runs[names[0]], runs[other]) for other in names[1:]}
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    output.with_suffix(".md").write_text(table(result))
    print(table(result))


def train(config: str, overrides: list[str], backend: str, directory: str) -> None:
    run = [f"model.mixing_backend={backend}", f"name={backend}", f"output_dir={directory}"]
    subprocess.run([sys.executable, "train.py", "--config", config, *overrides, *run], check=True, cwd=ROOT)


def hardware() -> dict:
    if not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "unknown"


def summary(lines: list[dict]) -> dict:
    """Median throughput after the first logged window, which holds the start-up; the last losses; peak memory."""
    steps = [line for line in lines if "loss" in line]
    validation = [line for line in lines if "validation_loss" in line]
    return {
        "steps": steps[-1]["step"],
        "last_loss": steps[-1]["loss"],
        "validation_loss": validation[-1]["validation_loss"],
        "validation_bits_per_byte": validation[-1]["validation_bits_per_byte"],
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steps[1:]),
        "useful_tflops": statistics.median(line["useful_tflops"] for line in steps[1:]),
        "peak_memory_gb": steps[-1].get("peak_memory_gb"),
    }


def gap(first: list[dict], second: list[dict]) -> dict:
    """Relative differences of the training losses at the steps that both logged."""
    losses, others = ({line["step"]: line["loss"] for line in lines if "loss" in line} for lines in (first, second))
    gaps = {step: abs(losses[step] - others[step]) / others[step] for step in losses if step in others}
    worst = max(gaps, key=gaps.get)
    return {
        "steps_compared": len(gaps),
        "largest_relative_gap": gaps[worst],
        "at_step": worst,
        "mean_relative_gap": statistics.mean(gaps.values()),
    }


def table(result: dict) -> str:
    """The result as Markdown."""
    rows = [
        "| backend | tokens/s | useful TFLOP/s | peak memory, GB | validation loss | bits per byte |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, run in result["backends"].items():
        memory = f"{run['peak_memory_gb']:.1f}" if run["peak_memory_gb"] else "-"
        rows.append(
            f"| {name} | {run['tokens_per_second']:,.0f} | {run['useful_tflops']:.0f} | {memory} "
            f"| {run['validation_loss']:.4f} | {run['validation_bits_per_byte']:.4f} |"
        )
    gaps = [
        f"{pair}: training loss apart by {gap['mean_relative_gap']:.2%} on average and {gap['largest_relative_gap']:.2%} at most "
        f"(step {gap['at_step']}), over {gap['steps_compared']} logged steps."
        for pair, gap in result["gaps"].items()
    ]
    device = ", ".join(f"{key} {value}" for key, value in result["hardware"].items())
    return "\n".join(rows) + "\n\n" + "\n".join(gaps) + f"\n\nMeasured on {device}; commit {result['commit'][:10]}.\n"


if __name__ == "__main__":
    main()
