"""What the GPUs of one host do together, by real runs of train.py:

    python benchmarks/several_gpus.py --output PATH [--processes 1,2,4,8] [--only PART ...] \\
        [--repeats 3] [--kills 5] [section.key=value ...]

start   All processes start at once, without data and kernels: how often these are made, and how
        long until the first loss.
speed   Tokens/s with DDP on several GPUs against so many times one.
fsdp    Tokens/s and memory with FSDP against DDP, at hidden size 2048; also of DDP without a CUDA
        graph, and of FSDP whose weights stay from the forward to the backward pass.
muon    How far the losses of FSDP are from those of DDP, over 200 steps with Muon, in fp32 and
        bf16; and for comparison, how far in bf16 those of DDP without a CUDA graph are.
kill    One process gets SIGKILL at a random step, and the same command goes on; several times.
        Whether the run ends with the bits of the undisturbed one, which is that of `start`.
resume  Half of the processes go on from a checkpoint of all, then all again, with the same global
        batch: how far the losses are from those of the undisturbed run.
large   The recipe at hidden size 4096 with 24 blocks, by FSDP: speed and memory. One process gets
        SIGKILL, and the same command goes on: whether the steps after the checkpoint have the same
        losses. Then one GPU goes on from there with recomputation.

All parts but `speed` take the largest number of processes. Speeds are measured in rounds. A run's
tokens/s are the median of its windows of logged steps after the first, which holds the start.

PATH.json has each row when it is measured, and the same command measures those that are missing.
PATH-runs has data, kernels and runs, and can be deleted. Without a GPU the processes are on CPUs;
then give overrides for a small model.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch
from saving import file_of, markdown, measured_by, numbers, origin, parser_of, save

from mixer.common.errors import UserError, run_command
from mixer.common.files import sha256
from mixer.common.hardware import ROOT
from mixer.reporting.text import read_metrics, series
from mixer.training.config import read_yaml

PARTS = ("start", "speed", "fsdp", "muon", "kill", "resume", "large")
# The text of configs/comparison.yaml, which is on every machine.
TEXT = ["data.source=builtin", "data.path=", "data.subset=packages", "data.max_documents=5200"]
TEXT += ["data.validation_fraction=0.02", "model.max_position_embeddings=512"]
TEXT += ["train.eval_every=0", "train.eval_samples=8"]
FLAT = ["--config", "configs/comparison.yaml", *TEXT]
KEYED = ["--config", "configs/keyed.yaml", *TEXT]
LARGE = [*FLAT, "model.hidden_size=2048"]
RECIPE = ["--config", "configs/recipe.yaml", *TEXT, "logging.log_every=1"]
SPEEDS = [("flat", FLAT, 32), ("flat", FLAT, 128), ("keyed by lag", KEYED, 128)]
WINDOWS = 5  # logged ones after the first
WINDOW_SAMPLES = 640  # of a GPU in each
MEASURED = ("tokens_per_second", "peak_memory_gb")  # of a window, as the metrics have them
# What accelerate launch tells its processes where its configuration file asks for FSDP.
FSDP_CONFIG = read_yaml(ROOT / "configs/accelerate/1x8_fsdp.yaml")["fsdp_config"]
FSDP = {"ACCELERATE_USE_FSDP": "true"}
FSDP |= {key.upper(): str(value) for key, value in FSDP_CONFIG.items()}
GATHERED_ONCE = FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false"}
NO_GRAPH = [*LARGE, "train.cuda_graphs=false"]
ENGINES = {
    "DDP": (LARGE, {}),
    "DDP without a CUDA graph": (NO_GRAPH, {}),
    "FSDP": (LARGE, FSDP),
    "FSDP, gathered once": (LARGE, GATHERED_ONCE),
}

# The run that is killed or goes on with other processes, and the undisturbed one.
SAVE = 50  # steps between checkpoints
STEPS = 350
BATCH = 64
SMALL = [*FLAT, "model.hidden_size=512", "model.num_hidden_layers=4", "logging.log_every=10"]
SMALL += ["optim.schedule=constant", "optim.warmup_steps=10"]
SMALL += [f"checkpoint.save_every={SAVE}", "checkpoint.keep=100"]
# The large run, and where it is killed: after a checkpoint, by as many steps as are compared.
LARGEST = [*RECIPE, "model.hidden_size=4096", "model.num_hidden_layers=24"]
LARGEST += ["optim.schedule=constant", "optim.warmup_steps=20", f"checkpoint.save_every={SAVE}"]
LARGEST_STEPS = 2 * SAVE
LARGEST_BATCH = 16
REPEATED = 8
PATIENCE = 60  # seconds in which all processes must end when one was killed


def main() -> None:
    parser = parser_of(__doc__)
    counts = [count for count in (1, 2, 4, 8) if count <= max(2, torch.cuda.device_count())]
    parser.add_argument("--processes", type=numbers, default=counts)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=3, help="rounds of speeds")
    parser.add_argument("--kills", type=int, default=5, choices=range(1, STEPS // SAVE - 1))
    options, overrides = parser.parse_known_args()
    if options.processes[0] != 1 or options.processes[-1] == 1:
        raise UserError(f"--processes {options.processes}; allowed: 1 and larger numbers after it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # ends the run of the moment, too
    file = file_of(options.output, ".json")
    folder = file_of(options.output, "-runs")
    bench = Bench(folder.absolute(), overrides, options.processes[-1])
    result = measured_by(options) | {"rows": {}}
    if file.exists():
        earlier = json.loads(file.read_text())
        if earlier["commit"] != result["commit"]:
            raise UserError(f"{file} was measured at another commit; give another --output")
        result["rows"] = earlier["rows"]
    for name, measure in measurements(bench, options).items():
        if name not in result["rows"] and name.split()[0] in options.only:
            result["rows"][name] = measure()
            print(name, result["rows"][name], flush=True)
            save(result, table(result), options.output)
    print(table(result))


def measurements(bench: "Bench", options: argparse.Namespace) -> dict[str, Callable[[], dict]]:
    """What measures each row, by its name, which begins with the part."""
    by_row: dict[str, Callable[[], dict]] = {"start": partial(start, bench)}
    for number in range(1, options.repeats + 1):
        for model, settings, samples in SPEEDS:
            against = f"speed {model} {samples}, 1, round {number}"
            for count in options.processes:
                row = {"model": model, "samples": samples, "gpus": count, "against": against}
                name = f"speed {model} {samples}, {count}, round {number}"
                by_row[name] = partial(speed, bench, row, settings)
        for engine, (settings, environment) in ENGINES.items():
            row = {"model": f"hidden size 2048, {engine}", "samples": 32, "gpus": bench.count}
            row["against"] = f"fsdp DDP, round {number}"
            name = f"fsdp {engine}, round {number}"
            by_row[name] = partial(speed, bench, row, settings, environment)
    by_row["muon"] = partial(muon, bench)
    by_row["kill"] = partial(kill, bench, options.kills)
    by_row["resume"] = partial(resume, bench)
    by_row["large"] = partial(large, bench)
    by_row["large alone"] = partial(large_alone, bench)
    return by_row


# ------------------------------------------------------------------------- runs


@dataclass
class Bench:
    """Starts runs on several processes by torchrun, as users do. Each row is measured by some.

    folder: of the runs' directories, outputs (NAME.txt), data and kernels.
    overrides: of all runs. They go after a run's own settings.
    count: the largest number of processes.
    """

    folder: Path
    overrides: list[str]
    count: int

    @contextmanager
    def run(
        self,
        name: str,
        count: int,
        settings: list[str],
        environment: dict[str, str] | None = None,
    ) -> Iterator[subprocess.Popen]:
        """The launcher of a run. It is stopped if the block fails."""
        command = [sys.executable]
        if count > 1:
            command += ["-m", "torch.distributed.run"]
            command += ["--standalone", f"--nproc_per_node={count}"]
        command += ["train.py", *settings, *self.overrides]
        command += [f"name={name}", f"output_dir={self.folder}"]
        command += [f"data.directory={self.folder}/data"]
        cache = {"MIXER_CACHE": f"{self.folder}/cache"}
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{name}.txt", "w") as output:
            launcher = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | cache | (environment or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield launcher
        finally:
            launcher.terminate()
            launcher.wait()

    def until(self, happened: Callable[[], bool], launcher: subprocess.Popen, name: str) -> None:
        """Waits for what a run brings about. Raises UserError if it has ended before."""
        while not happened():
            if launcher.poll() is not None and not happened():
                raise UserError(f"the run {name} has ended:\n{self.printed(name)[-4000:]}")
            time.sleep(0.005)

    def complete_run(
        self,
        name: str,
        count: int,
        settings: list[str],
        environment: dict[str, str] | None = None,
    ) -> None:
        with self.run(name, count, settings, environment) as launcher:
            self.until(lambda: launcher.poll() == 0, launcher, name)

    def printed(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def step(self, name: str) -> int:
        """The last step that a run has logged; 0 before the first."""
        metrics = self.folder / name / "metrics.jsonl"
        if not metrics.exists():
            return 0
        steps = re.findall('"step": ([0-9]+)', metrics.read_text())
        return int(steps[-1]) if steps else 0

    def fresh(self, name: str) -> Path:
        """A directory of the folder, once it is gone."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name

    def undisturbed(self) -> Path:
        """The run of `start`."""
        run = self.folder / "undisturbed"
        if not (run / f"step-{STEPS}").exists():
            start(self)
        return run


# ------------------------------------------------------------------------- parts


def start(bench: Bench) -> dict:
    for name in ("data", "cache", "undisturbed"):
        run = bench.fresh(name)
    began = time.monotonic()
    with bench.run(run.name, bench.count, small(BATCH)) as launcher:
        bench.until(lambda: bench.step(run.name) > 0, launcher, run.name)
        seconds = round(time.monotonic() - began, 1)
        bench.until(lambda: launcher.poll() == 0, launcher, run.name)
    printed = bench.printed(run.name)
    return {
        "processes": bench.count,
        "seconds to the first loss": seconds,
        "data made": printed.count("tokenizer: "),
        "kernels built": printed.count("building CUDA kernels"),
    }


def small(samples: int, steps: int = STEPS) -> list[str]:
    return [*SMALL, f"train.batch_size={samples}", f"train.steps={steps}"]


def speed(
    bench: Bench,
    row: dict,
    settings: list[str],
    environment: dict[str, str] | None = None,
) -> dict:
    """row: what is measured, and the name of the row that it is set against."""
    window = max(WINDOW_SAMPLES // row["samples"], 1)
    settings = [*settings, f"train.batch_size={row['samples']}", "optim.warmup_steps=1"]
    settings += [f"train.steps={window * (WINDOWS + 1)}", f"logging.log_every={window}"]
    settings += ["checkpoint.save_every=0", "checkpoint.save_last=false"]
    run = bench.fresh("speed")
    bench.complete_run(run.name, row["gpus"], settings, environment)
    windows = [line for line in read_metrics(run) if "loss" in line][1:]
    row |= {key: median(line[key] for line in windows) for key in MEASURED}
    return row | {"tokens": windows[0]["tokens"] // windows[0]["step"] // row["gpus"]}


def kill(bench: Bench, kills: int) -> dict:
    undisturbed = bench.undisturbed()
    run = bench.fresh("killed")
    rng = random.Random(0)
    settings = small(BATCH)
    ends = []
    for number in range(1, kills + 1):
        # The lines of steps after the last save are there until the run has begun again.
        step = max(SAVE * number + rng.randrange(SAVE), bench.step(run.name) + 1)
        with bench.run(run.name, bench.count, settings) as launcher:
            bench.until(lambda step=step: bench.step(run.name) >= step, launcher, run.name)
            bench.until(lambda: any(run.glob("step-*[0-9]")), launcher, run.name)
            rank = rng.randrange(bench.count)
            step = bench.step(run.name)
            ends.append({"killed ranks": rank, "after steps": step} | end(launcher, rank))
        cause = re.search(r"Root Cause.*?rank +: (\d+)", bench.printed(run.name), re.DOTALL)
        ends[-1]["named by the launcher"] = cause and int(cause[1])
    bench.complete_run(run.name, bench.count, settings)
    row = {"processes": bench.count, "the same bits": outcome(run) == outcome(undisturbed)}
    return row | {key: [ended[key] for ended in ends] for key in ends[0]}


def end(launcher: subprocess.Popen, rank: int) -> dict:
    """Kills a process of a run. The others must end by themselves; those that have not in PATIENCE
    are killed, too.
    """
    parent = psutil.Process(launcher.pid)
    ranks = parent.children()
    began = time.monotonic()
    next(process for process in ranks if process.environ()["RANK"] == str(rank)).kill()
    _, alive = psutil.wait_procs([*ranks, parent], PATIENCE)
    seconds = round(time.monotonic() - began, 1)
    for process in alive:
        process.kill()
    return {"seconds to the end": seconds, "left alive": len(alive)}


def outcome(run: Path) -> tuple:
    """All losses, and the SHA-256 of the last checkpoint's weights and optimizer state."""
    files = sorted((run / f"step-{STEPS}").rglob("*.safetensors"))
    return series(read_metrics(run), "loss"), [(file.name, sha256(file)) for file in files]


def resume(bench: Bench) -> dict:
    undisturbed = bench.undisturbed()
    run = bench.fresh("resumed")
    half = bench.count // 2
    begin = f"checkpoint.resume={undisturbed}/step-{STEPS - 2 * SAVE}"
    bench.complete_run(run.name, half, [*small(2 * BATCH, STEPS - SAVE), begin])
    bench.complete_run(run.name, bench.count, small(BATCH))
    losses = losses_by_step(run)
    expected = losses_by_step(undisturbed)
    return {
        "processes": [bench.count, half, bench.count],
        "losses": len(losses),
        "most apart (relative)": most_apart(losses, expected),
    }


def muon(bench: Bench) -> dict:
    settings = [*RECIPE, "model.hidden_size=512", "model.num_hidden_layers=6"]
    settings += ["train.batch_size=16", "train.steps=200", "optim.warmup_steps=20"]
    settings += ["checkpoint.save_every=0", "checkpoint.save_last=false"]

    def losses_of(name: str, environment: dict[str, str], *changes: str) -> dict[int, float]:
        run = bench.fresh(f"muon-{name}")
        bench.complete_run(run.name, bench.count, [*settings, *changes], environment)
        return losses_by_step(run)

    fp32 = ["train.mixed_precision=no", "train.tf32=false"]
    ddp_in_fp32 = losses_of("ddp-fp32", {}, *fp32)
    ddp = losses_of("ddp", {})
    return {
        "processes": bench.count,
        "losses": len(ddp),
        "most apart, fp32": most_apart(losses_of("fsdp-fp32", FSDP, *fp32), ddp_in_fp32),
        "most apart, bf16": most_apart(losses_of("fsdp", FSDP), ddp),
        "most apart, bf16, DDP without a graph": most_apart(
            losses_of("ddp-no-graph", {}, "train.cuda_graphs=false"), ddp
        ),
    }


def large(bench: Bench) -> dict:
    run = bench.fresh("large")
    checkpoint = run / f"step-{SAVE}"
    settings = [*LARGEST, f"train.batch_size={LARGEST_BATCH}", f"train.steps={LARGEST_STEPS}"]
    resident: dict[int, float] = {}  # bytes at most, by process
    with bench.run(run.name, bench.count, settings, FSDP) as launcher:

        def is_at_the_kill() -> bool:
            watch(launcher, resident)
            return checkpoint.exists() and bench.step(run.name) >= SAVE + REPEATED

        bench.until(is_at_the_kill, launcher, run.name)
        before = losses_by_step(run)
        left_alive = end(launcher, bench.count - 1)["left alive"]
    if (run / f"step-{LARGEST_STEPS}").exists():
        raise UserError(f"{run} ended before the kill")
    settings += ["checkpoint.save_every=0", "checkpoint.save_last=false"]
    bench.complete_run(run.name, bench.count, settings, FSDP)
    if f"resuming {checkpoint}" not in bench.printed(run.name):
        raise UserError(f"{run} did not go on from {checkpoint}: see {run}.txt")
    losses = losses_by_step(run)
    repeated = [step for step in before if step > SAVE]
    lines = [line for line in read_metrics(run) if "loss" in line]
    return {
        "processes": bench.count,
        "samples": LARGEST_BATCH,
        "tokens_per_second": round(median(line["tokens_per_second"] for line in lines)),
        "GB a GPU": max(line["peak_memory_gb"] for line in lines),
        "GB of host memory, up to the kill": [
            round(size / 1e9, 1) for size in sorted(resident.values())[::-1]
        ],
        "first and last loss": [losses[1], losses[LARGEST_STEPS]],
        "left alive": left_alive,
        "losses after the kill": len(repeated),
        "the same bits": all(before[step] == losses[step] for step in repeated),
    }


def large_alone(bench: Bench) -> dict:
    """One GPU goes on from the checkpoint of `large`, with the same global batch."""
    run = bench.folder / "large"
    checkpoint = run / f"step-{SAVE}"
    if not checkpoint.exists():
        raise UserError(f"{checkpoint} is missing: measure all again, with another --output")
    alone = bench.fresh("large-alone")
    settings = [*LARGEST, f"train.batch_size={LARGEST_BATCH * bench.count}"]
    settings += [f"train.steps={SAVE + REPEATED}", "train.recompute=block"]
    settings += [f"checkpoint.resume={checkpoint}", "checkpoint.save_last=false"]
    bench.complete_run(alone.name, 1, settings)
    lines = [line for line in read_metrics(alone) if "loss" in line]
    return {
        "tokens_per_second": round(median(line["tokens_per_second"] for line in lines)),
        "GB": max(line["peak_memory_gb"] for line in lines),
        "most apart (relative)": most_apart(losses_by_step(alone), losses_by_step(run)),
    }


def watch(launcher: subprocess.Popen, resident: dict[int, float]) -> None:
    """Keeps the most host memory that each process of a run has had."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher.pid).children():
            size = process.memory_info().rss
            resident[process.pid] = max(size, resident.get(process.pid, 0))


def most_apart(losses: dict[int, float], expected: dict[int, float]) -> float:
    return float(f"{max(abs(losses[step] / expected[step] - 1) for step in losses):.1e}")


def losses_by_step(run: Path) -> dict[int, float]:
    steps, losses = series(read_metrics(run), "loss")
    return dict(zip(steps, losses, strict=True))


# ------------------------------------------------------------------------- report


def table(result: dict) -> str:
    rows = result["rows"]
    speeds: dict[tuple, list[dict]] = {}
    remarks = []
    for name, row in rows.items():
        if "model" in row:
            speeds.setdefault((row["model"], row["tokens"], row["gpus"]), []).append(row)
        else:
            remarks.append(f"- **{name}**: " + "; ".join(f"{key} {row[key]}" for key in row))
    head = ["model", "tokens a GPU", "GPUs", "tokens/s", "share of perfect, or of DDP"]
    lines = []
    for (model, tokens, count), rounds in speeds.items():
        rate, memory = (median(row[key] for row in rounds) for key in MEASURED)
        shares = [share(row, rows[row["against"]]) for row in rounds]
        cells = [model, f"{tokens:,}", str(count), f"{rate:,.0f}", f"{median(shares):.3f}"]
        spread = f"{min(shares):.3f} to {max(shares):.3f}"
        lines.append([*cells, spread, f"{memory:.1f}"])
    speed_table = markdown([*head, "over the rounds", "GB"], lines)
    return "\n".join([speed_table, "", *remarks, "", f"Measured on {origin(result)}.", ""])


def share(row: dict, baseline: dict) -> float:
    """Tokens/s of a GPU as a share of those of another row."""
    rate = row["tokens_per_second"] / row["gpus"]
    return rate / (baseline["tokens_per_second"] / baseline["gpus"])


if __name__ == "__main__":
    run_command(main)
