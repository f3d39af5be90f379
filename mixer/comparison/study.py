"""The results of a plan, and the processes that add to them: one run at a time for each GPU."""

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from mixer.common import progress
from mixer.common.errors import UserError, end_with_parent, first_line
from mixer.common.files import as_path, check_writable, read_json, results_locked, write_json
from mixer.common.terminal import lasting_output
from mixer.comparison.plan import SIGNALS, Job, Run, data_options
from mixer.comparison.report import COLUMNS, write_report

LEFT = 3  # exit status of a command that must be given again to do all
SAY_EVERY = 10.0  # seconds, of what a run has printed
# What each row of the results must have, what it must have if it has a loss, both for kinds, and
# what a report shows beside that.
OF_ROW = {"settings": dict, "hardware": dict, "commit": str}
OF_LOSS = {"validation_loss": float, "training_seconds": float, "steps": int}
OF_MODEL = {"kind": str, "size": str, "budget": float, "lr": float}
OF_SPEED = {"tokens_per_second": float, "training_tokens": int, "tokens_a_step": int}
SHOWN = {key: float | None for key, *_ in COLUMNS.values()}
ROW_SHAPE = SHOWN | OF_ROW | OF_LOSS | OF_MODEL | OF_SPEED
ROW_SHAPE |= {"text_sha256": [str], "command": str, "seed": int, str: object}
ROW_SHAPE |= {"hardware": {"device": str, "torch": str, str: object}}
VISIBLE = "CUDA_VISIBLE_DEVICES"


def result_paths(output: Path) -> tuple[Path, Path]:
    """The file of the results, and the folder of their runs. Raises UserError for a path that names
    neither.
    """
    output = as_path(output)
    if output.name in ("", ".."):
        raise UserError(
            f"--output {str(output)!r} names no file; allowed: a path without suffix, such as "
            "results/today"
        )
    return output.with_name(f"{output.name}.json"), output.with_name(f"{output.name}-runs")


@dataclass
class Running:
    """A run that trains, in a process of its own, and the last line of its output that was printed.
    Times are of time.monotonic().
    """

    job: Job
    run: Run
    gpu: str
    process: BaseProcess
    line: str = "started"
    line_began: float = field(default_factory=time.monotonic)  # when it was new
    line_printed: float = field(default_factory=time.monotonic)


@contextmanager
def open_study(output: Path, plan: dict, command: str, commit: str = "") -> Iterator["Study"]:
    """The results, which no other command can add to or replace inside of the block. commit: of the
    code; default: git's.
    """
    file, _ = result_paths(output)
    check_writable(file.parent)
    with results_locked(file):
        yield Study(output, plan, command, commit)


class Study:
    """Results in OUTPUT.json, which has each run when it ends; a run that is there is not repeated.
    Runs are saved in OUTPUT-runs until then, and go on where they were cut.
    """

    def __init__(self, output: Path, plan: dict, command: str, commit: str):
        self.file, self.folder = result_paths(output)
        earlier = read_results(self.file, plan) if self.file.exists() else {"runs": {}}
        self.runs: dict[str, dict] = earlier["runs"]  # rows by the names of runs
        self.result = earlier | {"plan": plan}
        self.origin = {"commit": commit, "command": command}  # of the rows that are added
        self.problems: list[str] = []
        self.stopped = False
        self.running: dict[Connection, Running] = {}

    @lasting_output()
    def work(self, jobs: list[Job]) -> int:
        """Does all runs, writes the report, and returns the exit status: LEFT after a signal.

        Jobs take turns, so that what is interrupted has something to compare. Raises UserError with
        what went wrong, when all other runs have ended.
        """
        # Only now, as it takes seconds, and wrong options are refused at once. Each run is a fork,
        # which has it then.
        import mixer.comparison.training  # noqa: F401
        from mixer.common.hardware import commit

        self.origin["commit"] = self.origin["commit"] or commit()
        runs_before = len(self.runs)
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in SIGNALS:
            signal.signal(number, self.stop)
        waiting: deque[tuple[Job, dict | None]]
        waiting = deque((job, None) for job in jobs)  # with the row of the job's last run
        free_gpus = visible_gpus()
        while self.running or (waiting and not self.stopped):
            while waiting and free_gpus and not self.stopped:
                job, row = waiting.popleft()
                if run := self.next_run(job, row):
                    self.start(job, run, free_gpus.pop(0))
            ready = wait(list(self.running), SAY_EVERY) if self.running else ()
            ended = [connection for connection in self.running if connection in ready]
            if not ended:
                self.say_progress()
            for connection in ended:
                running = self.running.pop(connection)
                free_gpus.append(running.gpu)
                if row := self.outcome(connection, running.run):
                    waiting.append((running.job, row))
                running.process.join()
        # Where nothing was left to do, only the report may be missing.
        if len(self.runs) > runs_before or not (self.problems or self.stopped):
            print(write_report(self.result, self.file))
            print(f"the report is in {self.file.parent}")
        if self.problems:
            raise UserError("\n".join(self.problems))
        if self.stopped:
            print("stopped by a signal; the same command continues")
        return LEFT if self.stopped else 0

    def stop(self, *_) -> None:
        self.stopped = True
        for running in self.running.values():
            running.process.terminate()

    def next_run(self, job: Job, row: dict | None) -> Run | None:
        """The next run of a job that is not in the results, if there is one."""
        with suppress(StopIteration):
            try:
                run = next(job) if row is None else job.send(row)
                while run.name in self.runs:
                    run = job.send(self.runs[run.name])
                return run
            except UserError as error:  # the other jobs go on
                self.problems.append(str(error))

    def start(self, job: Job, run: Run, gpu: str) -> None:
        # A fork has imported everything already. It can use CUDA only if this process has not.
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        text = recorded_text(run, self.runs)
        process = context.Process(target=report_run, args=(theirs, run, self.log_of(run), text))
        os.environ[VISIBLE] = gpu
        process.start()
        theirs.close()  # so that the end of the process ends what is read
        print(f"{run.name}: started; its output is in {self.log_of(run)}", flush=True)
        self.running[ours] = Running(job, run, gpu, process)
        if self.stopped:  # by a signal that came before this process was known
            process.terminate()

    def log_of(self, run: Run) -> Path:
        return self.folder / f"{run.folder}.txt"

    def say_progress(self) -> None:
        """Prints the last line of each run's output, if it is new, or after progress.SECONDS."""
        for running in self.running.values():
            log = self.log_of(running.run)
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            line = lines[-1] if lines else running.line
            seconds = time.monotonic()
            if line != running.line:
                running.line = line
                running.line_began = seconds
                print(f"{running.run.name}: {line}", flush=True)
            elif seconds - running.line_printed > progress.SECONDS:
                age = f"{seconds - running.line_began:.0f} s ago"
                print(f"{running.run.name}: {line} ({age})", flush=True)
            else:
                continue
            running.line_printed = seconds

    def outcome(self, connection: Connection, run: Run) -> dict | None:
        """The row of a process that has ended, if its run has: it is in the results now."""
        try:
            row = connection.recv()
        except EOFError:
            row = None if self.stopped else "its process was stopped; the same command continues"
        if isinstance(row, str):
            self.problems.append(f"{run.name}: {row}")
        if not isinstance(row, dict):
            return None
        self.runs[run.name] = row | self.origin
        write_json(self.file, self.result)
        loss = f"loss {row['validation_loss']:.4f}" if "validation_loss" in row else "diverged"
        print(f"{run.name}: {loss}", flush=True)
        return row


def read_results(file: Path, plan: dict) -> dict:
    """The results of earlier commands. Raises UserError for rows that a report could not show."""
    otherwise = "give another --output, or delete it to start afresh"
    results = read_json(file, otherwise, required={"runs": {str: ROW_SHAPE}})
    has_kinds = "kinds" in plan
    for name, row in results["runs"].items():
        has_loss = "failure" not in row
        required = [*OF_ROW]
        if has_kinds:
            required += OF_MODEL
        if has_loss:
            required += OF_LOSS
        if has_kinds and has_loss:
            required += OF_SPEED
        missing = [key for key in required if key not in row]
        if not missing:
            missing = [f"hardware.{k}" for k in ("device", "torch") if k not in row["hardware"]]
        if missing:
            problem = f"runs.{name} has no {missing[0]}"
            raise UserError(f"{file} is damaged ({problem}): {otherwise}")
    return results


def recorded_text(run: Run, rows: dict[str, dict]) -> list[str] | None:
    """The tokens' hashes of a run in the results that has the same data; None if there is none."""
    options = data_options(run.settings)
    for row in rows.values():
        if "text_sha256" in row and data_options(row["settings"]) == options:
            return row["text_sha256"]
    return None


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, or their numbers; one without a name where there is none.
    Named ones are not counted: to count parts of a GPU (MIG), torch starts CUDA.
    """
    if VISIBLE in os.environ:
        return os.environ[VISIBLE].split(",")
    import torch

    from mixer.common.hardware import sees_gpu

    if not torch.cuda.device_count():
        sees_gpu()  # warns where there should be one
        return [""]
    return [str(number) for number in range(torch.cuda.device_count())]


def report_run(connection: Connection, run: Run, file: Path, text: list[str] | None) -> None:
    """Sends a run's row, or what was wrong in words, or nothing of a run that a signal stopped."""
    from mixer.comparison.training import train_run

    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()
    with open(file, "a", buffering=1) as log, redirect_stdout(log):
        try:
            connection.send(train_run(run, file.parent, text))
        except Exception as error:
            traceback.print_exc(file=log)
            connection.send(f"{first_line(error)}; more in {log.name}")
