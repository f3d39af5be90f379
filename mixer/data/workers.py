"""Runs a task on many jobs in worker processes, and gives the results in the order of the jobs.

The workers are new programs, not forks: this process may have threads and a CUDA context, which a
fork would break. They end with it, however it ends: a worker exits when its pipe closes.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue

from mixer.common.errors import Interrupted, UserError

# Jobs handed out beyond the one whose result is next, for each worker.
AHEAD = 8
PACKAGE = Path(__file__).parents[1]
# The package without its __init__, which imports torch: that takes seconds and hundreds of MB, and
# no worker needs it.
START = f"""
import sys, types
package = sys.modules["mixer"] = types.ModuleType("mixer")
package.__path__ = [{str(PACKAGE)!r}]
from mixer.data.workers import serve
serve(int(sys.argv[1]))
"""

Task = Callable[..., object]  # called with a job, and with a function that takes its updates


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def results(task: Task, jobs: Iterable, workers: int, on_update: Callable) -> Iterator:
    """(job, `task(job, send_update)`) of each job, in the order of the jobs, computed by `workers`
    processes. One worker is this process itself.

    A task's updates go to `on_update` at once, in any order. Task, jobs, updates and results are
    pickled; the task is a picklable object of this package. An exception in a task is raised here.
    Raises UserError if a worker is killed. The workers end when the generator does.
    """
    if workers == 1:
        yield from ((job, task(job, on_update)) for job in jobs)
        return
    processes = [_Worker(task) for _ in range(workers)]
    try:
        yield from _in_order(processes, jobs, on_update)
    finally:
        for process in processes:
            process.kill()


def _in_order(workers: list["_Worker"], jobs: Iterable, on_update: Callable) -> Iterator:
    jobs, more = enumerate(jobs), True
    idle, busy, done, given, taken = list(workers), {}, {}, 0, 0
    while more or busy or done:
        while more and idle and given - taken < AHEAD * len(workers):
            if more := (numbered := next(jobs, None)) is not None:
                worker = idle.pop()
                worker.give(numbered[1])
                busy[worker.connection] = *numbered, worker
                given += 1
        for connection in wait(list(busy)) if busy and taken not in done else ():
            number, job, worker = busy[connection]
            kind, value = worker.receive()
            if kind == "error":
                raise value
            if kind == "update":
                on_update(value)
                continue
            done[number] = job, value
            idle.append(worker)
            del busy[connection]
        while taken in done:
            yield done.pop(taken)
            taken += 1


class _Worker:
    """One worker process, seen from here."""

    def __init__(self, task: Task):
        self.connection, other_end = multiprocessing.Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(other_end.fileno())],
            pass_fds=[other_end.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                # Each worker is one of several that share the cores.
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        other_end.close()
        self.give(task)

    def give(self, value) -> None:
        try:
            self.connection.send(value)
        except OSError:
            raise self._ended() from None

    def receive(self) -> tuple[str, object]:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> Interrupted:
        status = self.process.wait()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return Interrupted(
            f"a worker process ended {how} before it was done; if memory is short, set a smaller "
            "data.workers. Started again, the preparation goes on from what is done"
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


# --- in the worker -----------------------------------------------------------


def serve(descriptor: int) -> None:
    """The main function of a worker: does jobs until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends its workers
    connection = Connection(descriptor)
    task = connection.recv()
    jobs: SimpleQueue = SimpleQueue()
    threading.Thread(target=_take_jobs, args=(connection, jobs), daemon=True).start()
    while True:
        try:
            answer = "result", task(jobs.get(), lambda update: connection.send(("update", update)))
        except BaseException as error:
            if not isinstance(error, UserError | OSError):  # a mistake of ours
                error.add_note(f"In a worker process:\n{traceback.format_exc()}")
            answer = "error", error
        connection.send(answer)


def _take_jobs(connection: Connection, jobs: SimpleQueue) -> None:
    """Puts what arrives into the queue, and ends this process at once when the parent is gone, also
    in the middle of a job.
    """
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)
