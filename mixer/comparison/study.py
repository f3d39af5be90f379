"""The results of a plan, and the processes that add to them: one for each visible GPU."""

import json
import multiprocessing
import os
import signal
from collections import deque
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from mixer.common.errors import UserError
from mixer.common.files import write_json
from mixer.comparison.measure import SIGNALS, report_run
from mixer.comparison.plan import Job, Run
from mixer.comparison.report import write_report

LEFT = 3  # exit status of a command that must be given again to do all


class Study:
    """Results in `file` as JSON, which has each run when it ends; a run that is there is not
    repeated. Runs are saved in `folder` until then, and go on where they were cut.
    """

    def __init__(self, file: Path, folder: Path, plan: dict, command: str, commit: str):
        found = json.loads(file.read_text()) if file.exists() else {"runs": {}}
        self.runs: dict[str, dict] = found["runs"]
        self.result = found | {"command": command, "plan": plan}
        self.file, self.folder, self.commit = file, folder, commit
        self.problems: list[str] = []
        self.stopped = False
        self.running: dict[Connection, tuple[Job, Run, str, multiprocessing.Process]] = {}

    def work(self, jobs: list[Job]) -> int:
        """Does all runs, writes the report, and returns the exit status: LEFT after a signal.

        Runs of several jobs take turns, so that what is interrupted has something to compare.

        Raises UserError with what went wrong, when all other runs have ended.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in SIGNALS:
            signal.signal(number, self.stop)
        waiting, free = deque((job, None) for job in jobs), visible_gpus()
        while self.running or (waiting and not self.stopped):
            while waiting and free and not self.stopped:
                job, row = waiting.popleft()
                if run := self.next_run(job, row):
                    self.start(job, run, free.pop(0))
            for connection in wait(list(self.running)) if self.running else ():
                job, run, gpu, process = self.running.pop(connection)
                free.append(gpu)
                if row := self.outcome(connection, run):
                    waiting.append((job, row))
                process.join()
        if self.runs:
            print(write_report(self.result, self.file))
            print(f"the report is in {self.file.parent}")
        if self.problems:
            raise UserError("\n".join(self.problems))
        if self.stopped:
            print("stopped by a signal; the same command goes on")
        return LEFT if self.stopped else 0

    def stop(self, *_) -> None:
        self.stopped = True
        for *_, process in self.running.values():
            process.terminate()

    def next_run(self, job: Job, row: dict | None) -> Run | None:
        """The next run of a job that is not in the results, if there is one."""
        try:
            run = job.send(row)
            while run.name in self.runs:
                run = job.send(self.runs[run.name])
            return run
        except StopIteration:
            return None
        except UserError as error:  # the other jobs go on
            self.problems.append(str(error))
            return None

    def start(self, job: Job, run: Run, gpu: str) -> None:
        # A fork has imported everything already, but CUDA does not survive one. CUDA reads which
        # GPUs are visible when it is first asked, perhaps by an import: the process is born with
        # one.
        context = multiprocessing.get_context("spawn" if gpu else "fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=report_run, args=(theirs, run, self.folder))
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        process.start()
        theirs.close()  # so that the end of the process ends what is read
        self.running[ours] = job, run, gpu, process
        if self.stopped:  # by a signal that came before this process was known
            process.terminate()

    def outcome(self, connection: Connection, run: Run) -> dict | None:
        """The row of a process that has ended, if its run has: it is in the results now."""
        try:
            row = connection.recv()
        except EOFError:
            row = None if self.stopped else "its process was stopped; the same command goes on"
        if isinstance(row, dict) and (other := self.run_on_another_text(row)):
            row = (
                f"the text has changed: {self.file} has a run {other!r} with the same options for "
                "data, and other tokens. Give that text, or another --output"
            )
        if isinstance(row, str):
            self.problems.append(f"{run.name}: {row}")
        if not isinstance(row, dict):
            return None
        self.runs[run.name] = row | {"commit": self.commit}
        write_json(self.file, self.result)
        loss = f"loss {row['validation_loss']:.4f}" if "validation_loss" in row else "diverged"
        print(f"{run.name}: {loss}", flush=True)
        return row

    def run_on_another_text(self, row: dict) -> str | None:
        """A run of the results with the options for data of `row`, but other tokens."""

        def data(row: dict) -> dict:
            return {key: row["settings"][key] for key in row["settings"] if key[:5] == "data."}

        text = row["text_sha256"]
        for name, other in self.runs.items():
            if other.get("text_sha256", text) != text and data(other) == data(row):
                return name
        return None


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; one without a name where there is none."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return named.split(",")[:count] or [""]
