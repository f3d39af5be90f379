"""The losses of 100 steps, written down: what training gives must not change unnoticed.

    python tests/training/golden_losses.py tests/training/golden/cpu_fp32.json
    python tests/training/golden_losses.py tests/training/golden/h200_bf16.json --processes 1 \\
        train.mixed_precision=bf16 model.mixing_backend=cuda

makes such a file on the machine at hand; `--compare` trains in the same way again and compares. The
text is made up by a counter, so that it is the same on every machine.
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
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "max_position_embeddings": 64,
        "mixing_backend": "dense",
    },
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
    generator = random.Random(0)
    with open(path, "w") as file:
        for _ in range(400):
            words = []
            for _ in range(120):
                count = 1 + int(3 * generator.random() ** 2)
                words.append(
                    "".join(
                        SYLLABLES[int(len(SYLLABLES) * generator.random() ** 2)]
                        for _ in range(count)
                    )
                )
            file.write(json.dumps({"text": " ".join(words) + "."}) + "\n")


def run_settings(directory: Path, overrides: list[str]) -> list[str]:
    """Writes corpus and configuration into `directory`; returns the arguments of train.py."""
    write_corpus(directory / "corpus.jsonl")
    data = SETTINGS["data"] | {
        "path": str(directory / "corpus.jsonl"),
        "directory": str(directory / "data"),
    }
    settings = SETTINGS | {"name": "golden", "output_dir": str(directory), "data": data}
    (directory / "golden.yaml").write_text(yaml.safe_dump(settings))
    return ["--config", str(directory / "golden.yaml"), *overrides]


def read_result(directory: Path) -> dict:
    lines = [
        json.loads(line)
        for line in (directory / "golden" / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        "train": [line["loss"] for line in lines if "loss" in line],
        "validation": [line["validation_loss"] for line in lines if "validation_loss" in line],
    }


def tokens_sha256(directory: Path) -> str:
    return json.loads((directory / "data" / "manifest.json").read_text())["splits"]["train"][
        "tokens_sha256"
    ]


def largest_gap(found: dict, golden: dict) -> float:
    """The largest relative difference of the losses that both results have. The files of GPUs have
    no validation losses: theirs were of another sample of the text.
    """
    pairs = [
        pair
        for key in ("train", "validation")
        if key in golden
        for pair in zip(found[key], golden[key], strict=True)
    ]
    return max(abs(a - b) / b for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--compare", type=float, metavar="TOLERANCE", help="compare with the file, do not write it"
    )
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={options.processes}",
        ]
        arguments = run_settings(directory, overrides)
        command = [*(launch if options.processes > 1 else [sys.executable]), "train.py", *arguments]
        environment = (
            os.environ if torch.cuda.is_available() else os.environ | {"ACCELERATE_USE_CPU": "true"}
        )
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        result = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "processes": options.processes,
            "overrides": overrides,
            "tokens_sha256": tokens_sha256(directory),
        } | read_result(directory)
    if options.compare is None:
        options.file.parent.mkdir(exist_ok=True)
        options.file.write_text(json.dumps(result, indent=1) + "\n")
        return
    golden = json.loads(options.file.read_text())
    same_data = "the same" if result["tokens_sha256"] == golden["tokens_sha256"] else "OTHER"
    gap = largest_gap(result, golden)
    print(
        f"{same_data} data; largest relative difference of a loss {gap:.2e}, "
        f"allowed {options.compare:.2e}"
    )
    sys.exit(gap > options.compare)


if __name__ == "__main__":
    main()
