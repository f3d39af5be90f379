"""The same training under several mixing backends, or beside a transformer: losses, speed, memory,
and the time of token mixing.

    python -m mixer.compare --config configs/demo.yaml --backends dense panels train.steps=200 --timing-steps 5
    python -m mixer.compare --config configs/comparison.yaml --backends cuda dense llama --seconds 100 optim.warmup_steps=100

Every run is train.py in a process of its own (--processes N: in N, by torchrun), with the same
seed, so from the same weights and on the same data in the same order. First each model, and the
masked mixer without its token mixing, is timed in turn, --repeats times: short runs, of which the
second half of the steps counts. Then each trains in full, for train.steps, or with --seconds for as
many steps as it is measured to do in that time, so that its learning rate ends its schedule.

The output directory gets report.md, report.json, pictures, metrics of each full run, the runs
themselves under runs/, and under comparison-logs/ what each printed. Only a run that has its log
there is ever replaced.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mixer.common.errors import UserError, run_command
from mixer.common.files import check_writable
from mixer.common.provenance import ROOT, commit
from mixer.comparison.report import report, write_report
from mixer.comparison.result import Measured, Timing, losses_of, result_of
from mixer.comparison.trace import token_mixing_share
from mixer.models.architecture import OF_LLAMA, OF_MIXERS, ModelConfig
from mixer.models.masked_mixer.plain import BACKENDS
from mixer.reporting.metrics_file import read_metrics
from mixer.training.config import RunConfig, load_config

LIMIT = "no mixing"
PROFILED_STEPS = 2
# in the output directory, which they tell from one that is not a comparison's
LOGS = "comparison-logs"


@dataclass(frozen=True)
class Entrant:
    """A model to train: its name, the settings that make it, and what runs it."""

    name: str
    overrides: tuple[str, ...]
    program: tuple[str, ...] = (str(ROOT / "train.py"),)

    @property
    def folder(self) -> str:
        return self.name.replace(":", "-").replace(" ", "-")

    @property
    def is_mixer(self) -> bool:
        return not self.name.startswith("llama")


def entrant(name: str) -> Entrant:
    """cuda, dense, panels or auto; llama (of the configuration's width) or llama:HIDDENxHEADS."""
    defaults = ModelConfig()
    if name in BACKENDS:
        unused = [f"model.{key}=null" for key in OF_LLAMA]
        return Entrant(
            name, ("model.architecture=masked_mixer", f"model.mixing_backend={name}", *unused)
        )
    kind, _, size = name.partition(":")
    hidden, _, heads = size.partition("x")
    if kind != "llama" or (size and not (hidden.isdecimal() and heads.isdecimal())):
        raise UserError(
            f"--backends {name}; allowed: {', '.join(BACKENDS)}, llama (as wide as the configuration's model), or "
            "llama:HIDDENxHEADS such as llama:512x4"
        )
    # Its MLP is as large as a masked mixer's of its width, whatever width the configuration gives
    # to that one.
    settings = ["model.architecture=llama", "model.intermediate_size=null"]
    settings += [f"model.{key}={json.dumps(getattr(defaults, key))}" for key in OF_MIXERS]
    settings += (
        [f"model.hidden_size={hidden}", f"model.num_attention_heads={heads}"] if size else []
    )
    return Entrant(name, tuple(settings))


class Trainer:
    """Starts the runs of a comparison, one at a time, and reads what they wrote."""

    def __init__(self, options: argparse.Namespace, overrides: list[str]):
        self.options, self.overrides = options, overrides
        self.directory = Path(options.output) / "runs"
        self.logs = Path(options.output) / LOGS

    def settings(self, who: Entrant, *overrides: str) -> list[str]:
        return [*self.overrides, *who.overrides, f"output_dir={self.directory}", *overrides]

    def config(self, who: Entrant, *overrides: str) -> RunConfig:
        """A run's configuration; raises UserError where its directory is someone else's."""
        run = load_config(self.options.config, self.settings(who, *overrides))
        if run.directory.exists() and not self.log(run).exists():
            raise UserError(
                f"{run.directory} is not a run of this comparison, which would have {self.log(run)}, and would be replaced; "
                "move it, or choose another --output"
            )
        return run

    def log(self, run: RunConfig) -> Path:
        """What the run prints. It is there before the run's directory and stays when that is
        deleted.
        """
        return self.logs / f"{run.name}.txt"

    def time(self, who: Entrant, repeat: int) -> Timing:
        """A short run; in the first repeat a few profiled steps follow those that are timed."""
        steps = self.options.timing_steps
        profiled = PROFILED_STEPS if repeat == 1 and who.name != LIMIT else 0
        directory = self._run(
            who,
            f"name={who.folder}-timing-{repeat}",
            f"train.steps={2 * steps + profiled}",
            f"optim.warmup_steps={2 * steps + profiled}",
            f"logging.log_every={steps}",
            f"logging.profile_step={2 * steps + 1}",
            f"logging.profile_steps={profiled}",
            "train.eval_every=0",
            "train.eval_samples=1",
            "checkpoint.save_every=0",
            "checkpoint.save_last=false",
        )
        line = next(
            line for line in read_metrics(directory) if line["step"] == 2 * steps and "loss" in line
        )
        share = (
            token_mixing_share(directory / f"profile-step-{2 * steps + 1}.json")
            if profiled
            else None
        )
        print(
            f"timing {repeat}/{self.options.repeats}: {who.name}, {line['tokens_per_second']:,.0f} tokens/s",
            flush=True,
        )
        return Timing(line["tokens_per_second"], line["peak_memory_gb"], share)

    def train(self, who: Entrant, steps: int) -> list[dict]:
        """A run in full; its metrics, also copied beside the report."""
        directory = self._run(
            who, f"name={who.folder}", f"train.steps={steps}", "logging.profile_steps=0"
        )
        shutil.copy(directory / "metrics.jsonl", Path(self.options.output) / f"{who.folder}.jsonl")
        lines = read_metrics(directory)
        last = losses_of(lines)
        print(f"trained: {who.name}, {steps} steps, loss {last[max(last)]:.4f}", flush=True)
        return lines

    def _run(self, who: Entrant, *overrides: str) -> Path:
        run = self.config(who, *overrides)
        if is_complete(run):  # of a comparison that goes on
            return run.directory
        self.logs.mkdir(parents=True, exist_ok=True)
        processes = self.options.processes
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
            if processes > 1
            else []
        )
        settings = self.settings(who, *overrides)
        command = [
            sys.executable,
            *launcher,
            *who.program,
            "--config",
            self.options.config,
            *settings,
        ]
        log = self.log(run)
        with open(log, "w") as file:
            shutil.rmtree(run.directory, ignore_errors=True)
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        if status or not reached_end(run):  # a signal stops a run with status 0
            ended = (
                f"ended with status {status}"
                if status
                else "was stopped before its last step (--resume does it again)"
            )
            last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise UserError(
                f"the run {run.name} {ended}; all of its output is in {log}, the end of it:\n{last}"
            )
        return run.directory


def is_complete(run: RunConfig) -> bool:
    """Whether the run's directory holds all of it: these settings, up to the evaluation at the
    end.
    """
    try:
        return load_config(str(run.directory / "config.yaml"), []) == run and reached_end(run)
    except UserError:  # nothing yet, or what a kill cut short
        return False


def reached_end(run: RunConfig) -> bool:
    """Whether the last line of metrics is that of the evaluation at the end."""
    last = read_metrics(run.directory)[-1]
    return last["step"] == run.train.steps and "validation_loss" in last


def compare(options: argparse.Namespace, overrides: list[str]) -> Path:
    """Times, trains and reports; returns the report's path. Raises UserError for what a person can
    mend.
    """
    entrants = [entrant(name) for name in options.backends]
    if len({who.name for who in entrants}) < len(entrants):
        raise UserError(
            f"--backends {' '.join(options.backends)}: one is named twice; give each once"
        )
    for name, low in (("repeats", 1), ("timing_steps", 1), ("processes", 1)):
        if getattr(options, name) < low:
            raise UserError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}; allowed: {low} or more"
            )
    if not options.seconds >= 0:
        raise UserError(
            f"--seconds is {options.seconds:g}; allowed: above 0, or left out for train.steps"
        )
    output = Path(options.output)
    filled = output.exists() and (not output.is_dir() or any(output.iterdir()))
    if filled and not options.resume:
        raise UserError(
            f"{output} exists already; choose another --output, delete it, or give --resume to go on with what was cut short"
        )
    if filled and not (output / LOGS).is_dir():
        raise UserError(
            f"--resume: {output} is not a comparison's, which has {LOGS} in it; choose another --output"
        )
    check_writable(output)
    trainer = Trainer(options, overrides)
    runs = {
        who: trainer.config(who, f"name={who.folder}") for who in entrants
    }  # mistakes show before anything runs

    timed = list(entrants)
    if any(who.is_mixer for who in entrants):
        timed.append(
            Entrant(LIMIT, entrant("auto").overrides, ("-m", "mixer.comparison.no_mixing"))
        )
    timings: dict[str, list[Timing]] = {who.name: [] for who in timed}
    for repeat in range(1, options.repeats + 1):
        for who in timed:
            timings[who.name].append(trainer.time(who, repeat))

    steps = {who: steps_of(who.name, run, timings[who.name], options) for who, run in runs.items()}
    measured = [
        Measured(who.name, who.is_mixer, run, timings[who.name], trainer.train(who, steps[who]))
        for who, run in runs.items()
    ]
    conditions = {
        "command": " ".join(["python -m mixer.compare", *sys.argv[1:]]),
        "commit": options.commit or commit(),
        "processes": options.processes,
    }
    conditions |= {"seconds": options.seconds or None, "timing_steps": options.timing_steps}
    result = result_of(measured, timings.get(LIMIT, []), conditions)
    print("\n" + report(result))
    return write_report(result, {one.name: one.lines for one in measured}, output)


def steps_of(name: str, run: RunConfig, timings: list[Timing], options: argparse.Namespace) -> int:
    """train.steps, or the steps that take --seconds at the median speed of the short runs."""
    if not options.seconds:
        return run.train.steps
    samples = run.train.batch_size * run.train.gradient_accumulation_steps * options.processes
    rate = median(timing.tokens_per_second for timing in timings)
    steps = max(1, round(options.seconds * rate / (samples * run.model.max_position_embeddings)))
    warmup = run.optim.warmup_steps
    if steps < warmup:
        raise UserError(
            f"--seconds {options.seconds:g} gives {name} {steps} steps; allowed: optim.warmup_steps = {warmup} or more; "
            "give more seconds or fewer warm-up steps, and --resume, which keeps what was timed"
        )
    return steps


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        required=True,
        help="YAML file, see configs/; section.key=value overrides follow",
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        required=True,
        help=f"{', '.join(BACKENDS)}, llama, llama:HIDDENxHEADS",
    )
    parser.add_argument("--output", default="runs/compare", help="a new directory")
    parser.add_argument("--repeats", type=int, default=3, help="short runs to time each model")
    parser.add_argument(
        "--timing-steps",
        type=int,
        default=20,
        help="steps that are timed in each of them, after as many others",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0,
        help="training time of each model, in place of train.steps",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on in the output directory: complete runs of these settings are kept",
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="processes (GPUs) of each run, on this machine"
    )
    parser.add_argument(
        "--commit", default="", help="commit that is measured; by default what git says"
    )
    options, overrides = parser.parse_known_args(arguments)
    overrides += [name for name in options.backends if "=" in name]  # they may follow the backends
    options.backends = [name for name in options.backends if "=" not in name]
    print(compare(options, overrides))


if __name__ == "__main__":
    run_command(main)
