"""The runs of a comparison: training in processes of its own, one run at a time."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mixer.checkpoints.format import incomplete
from mixer.common.errors import NotFinite, UserError
from mixer.common.files import whole_file, write_text
from mixer.common.locks import run_locked
from mixer.comparison.entrants import Entrant
from mixer.comparison.result import Timing, losses_of
from mixer.reporting.metrics_file import read_metrics
from mixer.training.config import RunConfig, load_config

# The folder of what the runs print. It marks the output directory as a comparison's.
LOGS = "comparison-logs"


@dataclass(frozen=True)
class Runs:
    """Starts the runs of a comparison in `output` and reads what they wrote."""

    config_file: str
    overrides: tuple[str, ...]  # section.key=value, for every run
    output: Path
    processes: int = 1

    def config(self, who: Entrant, *overrides: str) -> RunConfig:
        """A run's configuration. Raises UserError where its directory holds a run that this
        comparison did not make.
        """
        run = load_config(self.config_file, self._settings(who, overrides))
        if run.directory.exists() and not self._log(run).exists():
            raise UserError(
                f"{run.directory} is not a run of this comparison, which would have "
                f"{self._log(run)}, and would be replaced; move it, or choose another --output"
            )
        return run

    def time(self, who: Entrant, steps: int, repeat: int) -> Timing:
        """A short run of 2 x `steps` steps, of which the second half is timed."""
        directory = self._run(
            who,
            f"name={who.folder}-timing-{repeat}",
            f"train.steps={2 * steps}",
            f"optim.warmup_steps={2 * steps}",
            f"logging.log_every={steps}",
            "logging.profile_steps=0",
            "train.eval_every=0",
            "train.eval_samples=1",
            "checkpoint.save_every=0",
            "checkpoint.save_last=false",
        )
        trained = [line for line in read_metrics(directory) if "loss" in line]
        return Timing(trained[-1]["tokens_per_second"], trained[-1]["peak_memory_gb"])

    def train(self, who: Entrant, steps: int, name: str, *overrides: str) -> list[dict]:
        """A whole run of so many steps. Returns its metrics, which are also copied beside the
        report.
        """
        settings = (f"name={name}", f"train.steps={steps}", "logging.profile_steps=0")
        directory = self._run(who, *settings, *overrides)
        with whole_file(self.output / f"{name}.jsonl") as stage:
            shutil.copyfile(directory / "metrics.jsonl", stage)
        lines = read_metrics(directory)
        last = losses_of(lines)
        print(f"trained: {name}, {steps} steps, loss {last[max(last)]:.4f}", flush=True)
        return lines

    def _settings(self, who: Entrant, overrides: tuple[str, ...]) -> list[str]:
        return [*self.overrides, *who.overrides, f"output_dir={self.output / 'runs'}", *overrides]

    def _log(self, run: RunConfig) -> Path:
        """What the run prints. It exists before the run's directory does, and stays when that is
        deleted.
        """
        return self.output / LOGS / f"{run.name}.txt"

    def _run(self, who: Entrant, *overrides: str) -> Path:
        """Trains, unless an earlier comparison that was cut short has done so already. Raises
        NotFinite for a run that diverges.
        """
        run = self.config(who, *overrides)
        log = self._log(run)
        if not is_of(run) or not (reached_end(run) or has_diverged(log)):
            self._train(who, run, log, overrides)
        if not reached_end(run):
            raise NotFinite(f"the run {run.name} has diverged; {output_of(log)}")
        return run.directory

    def _train(self, who: Entrant, run: RunConfig, log: Path, overrides: tuple[str, ...]) -> None:
        if run.directory.exists():
            with run_locked(run.directory):  # a run may outlive a comparison that was killed
                shutil.rmtree(run.directory, ignore_errors=True)
        write_text(log, "")  # fails with a clear error where there is no space
        command = [sys.executable, *self._launcher(), "-m", who.module]
        command += ["--config", self.config_file, *self._settings(who, overrides)]
        with open(log, "w") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        if status and not has_diverged(log):
            raise UserError(f"the run {run.name} ended with status {status}; {output_of(log)}")
        if not status and not reached_end(run):  # a signal stops a run with status 0
            raise UserError(
                f"the run {run.name} was stopped before its last step "
                f"(--resume does it again); {output_of(log)}"
            )

    def _launcher(self) -> list[str]:
        if self.processes == 1:
            return []
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc_per_node={self.processes}"]


def output_of(log: Path) -> str:
    last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    return f"all of its output is in {log}, the end of it:\n{last}"


def has_diverged(log: Path) -> bool:
    """Whether a run has ended as its numbers were not finite, by what it printed. torchrun prints
    more after that.
    """
    return log.exists() and "not finite" in log.read_text(errors="replace")


def is_of(run: RunConfig) -> bool:
    """Whether the run's directory holds a run of these very settings."""
    try:
        return load_config(str(run.directory / "config.yaml"), []) == run
    except UserError:  # nothing yet, or a file that a kill cut short
        return False


def reached_end(run: RunConfig) -> bool:
    """Whether the last line of metrics is that of the evaluation after the last step, and the last
    checkpoint is there, if it was asked for.
    """
    if run.checkpoint.save_last and incomplete(run.directory / f"step-{run.train.steps}"):
        return False
    try:
        last = read_metrics(run.directory)[-1]
    except UserError:  # not a line yet
        return False
    return last["step"] == run.train.steps and "validation_loss" in last
