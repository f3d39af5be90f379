"""How fast a text is prepared, for several numbers of workers: MB of text a second in tokenising,
and the time to train the BPE.

    python benchmarks/preparation.py --source jsonl --path TEXTS --output PATH.json
    python benchmarks/preparation.py --source jsonl --path TEXTS --workers 1 8 16 --rounds 3

Each round prepares the text once for each number of workers, so that a change of the machine's load
meets them all; the BPE is trained once, before. All must write the same bytes. Prints, and writes
with hardware and commit, the median and the best speed of each number of workers.
"""

import argparse
import json
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from saving import measured_by

from mixer.common.errors import UserError, run_command
from mixer.common.files import write_text
from mixer.data.config import DataConfig
from mixer.data.corpus import fixed_splits, split_shards, training_documents
from mixer.data.prepare import SAMPLE_BYTES, prepare
from mixer.data.tokenizer import train_tokenizer
from mixer.data.workers import available_cores

SPEED = re.compile(r"tokenised: .* ([\d.]+) MB, .* in ([\d.]+) s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="jsonl", help="as data.source")
    parser.add_argument("--path", default="", help="as data.path")
    parser.add_argument("--vocab-size", type=int, default=8000)
    cores = available_cores()
    counts = sorted({1, 2, cores // 2 or 1, cores})
    parser.add_argument("--workers", type=int, nargs="+", default=counts)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a JSON file for what is found")
    parser.add_argument(
        "--commit", default="", help="commit that is measured; by default what git says"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="preparation-"))
    try:
        found = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    found |= {"cores": cores} | measured_by(options, "cpu")
    found["hardware"]["cpu"] = cpu_name()
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        write_text(options.output, text + "\n")


def measure(options, folder: Path) -> dict:
    settings = {"source": options.source, "path": options.path, "vocab_size": options.vocab_size}
    trained = train(DataConfig(**settings), folder)
    settings |= {"tokenizer": str(folder / "tokenizer")}
    speeds = {workers: [] for workers in options.workers}
    written = set()
    for _ in range(options.rounds):
        for workers, seen in speeds.items():
            directory, lines = folder / "prepared", []
            config = DataConfig(**settings, directory=str(directory), workers=workers)
            manifest = prepare(config, lines.append)
            shutil.rmtree(directory)
            megabytes, seconds = map(float, SPEED.search(lines[-1]).groups())
            seen.append(megabytes / seconds)
            written.add(manifest.fingerprint)
            print(f"{workers} workers: {lines[-1]}", flush=True)
    if len(written) > 1:
        raise UserError("the numbers of workers wrote different bytes: a mistake in mixer/data")
    rows = [
        {"workers": workers, "median_mb_s": statistics.median(seen), "best_mb_s": max(seen)}
        for workers, seen in speeds.items()
    ]
    return {"text_mb": megabytes, "bpe": trained, "rounds": options.rounds, "tokenising": rows}


def train(config: DataConfig, folder: Path) -> dict:
    """Trains the BPE on the text that a preparation would use, and saves it in `folder`."""
    texts, size = [], 0
    began = time.perf_counter()
    plan = split_shards(config)
    for text in training_documents(plan, config, fixed_splits(plan, config)):
        if size >= SAMPLE_BYTES:
            break
        texts.append(text)
        size += len(text.encode())
    read = time.perf_counter() - began
    began = time.perf_counter()
    train_tokenizer(texts, config.vocab_size).save_pretrained(str(folder / "tokenizer"))
    seconds = time.perf_counter() - began
    return {"mb": size / 1e6, "seconds_reading": read, "seconds_training": seconds}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    run_command(main)
