"""The losses of 100 steps, written down: what training gives must not change unnoticed.

    python tests/training/golden_losses.py tests/training/golden/cpu_fp32.json
    python tests/training/golden_losses.py tests/training/golden/h200_bf16.json \\
        train.mixed_precision=bf16 model.mixing_backend=cuda

writes such a file on the machine at hand; test_golden.py compares. The text is made up by a
counter, so that it is the same on every machine.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "model": {"hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 64}
    | {"mixing_backend": "dense"},
    "data": {"source": "jsonl", "vocab_size": 512, "validation_fraction": 0.1},
    "train": {"steps": 100, "batch_size": 16, "eval_every": 50, "eval_samples": 64, "tf32": False}
    | {"compile": "no"},
    "optim": {"lr": 2e-3, "warmup_steps": 10},
    "checkpoint": {"save_every": 0},
    "logging": {"log_every": 1},
}
SYLLABLES = "ba de fi go lu ma ne pi ro su ta ve".split()


def write_corpus(path: Path) -> None:
    """Words of a skewed choice of syllables; `random.random` gives the same numbers with every
    version of Python.
    """
    draw = random.Random(0).random

    def word() -> str:
        count = 1 + int(3 * draw() ** 2)
        return "".join(SYLLABLES[int(len(SYLLABLES) * draw() ** 2)] for _ in range(count))

    texts = [" ".join(word() for _ in range(120)) + "." for _ in range(400)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run_settings(directory: Path, overrides: list[str]) -> list[str]:
    """Writes corpus and configuration into `directory`; returns the arguments of train.py."""
    write_corpus(directory / "corpus.jsonl")
    places = {"path": str(directory / "corpus.jsonl"), "directory": str(directory / "data")}
    settings = SETTINGS | {"name": "golden", "output_dir": str(directory)}
    settings["data"] = SETTINGS["data"] | places
    (directory / "golden.yaml").write_text(yaml.safe_dump(settings))
    return ["--config", str(directory / "golden.yaml"), *overrides]


def read_result(directory: Path) -> dict:
    metrics = (directory / "golden/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    manifest = json.loads((directory / "data/manifest.json").read_text())
    return {
        "tokens_sha256": manifest["splits"]["train"]["tokens_sha256"],
        "train": [line["loss"] for line in lines if "loss" in line],
        "validation": [line["validation_loss"] for line in lines if "validation_loss" in line],
    }


def largest_gap(found: dict, golden: dict) -> float:
    """The largest relative difference of the losses that both results have. The files of GPUs have
    no validation losses: theirs were of another sample of the text.
    """
    both = [key for key in ("train", "validation") if key in golden]
    pairs = [pair for key in both for pair in zip(found[key], golden[key], strict=True)]
    return max(abs(a - b) / b for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    options, overrides = parser.parse_known_args()
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "train.py", *run_settings(Path(name), overrides)]
        on_cpu = {} if on_gpu else {"ACCELERATE_USE_CPU": "true"}
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | on_cpu)
        device = torch.cuda.get_device_name() if on_gpu else "cpu"
        result = {"device": device, "torch": torch.__version__, "overrides": overrides}
        result |= read_result(Path(name))
    options.file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
