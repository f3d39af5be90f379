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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path

from mixer.common.errors import UserError

FEW = 4  # jobs that are done before a worker has started
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
# Each worker is one of several that share the cores.
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
ONE_THREAD |= {"OPENBLAS_NUM_THREADS": "1"}


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def results(task: Callable, jobs: Iterable, most: int) -> Iterator:
    """`task(job)` of each job, in the order of the jobs, computed by at most `most` processes (0:
    one for each core). Few jobs are done in this process.

    At most 2 * `most` jobs are held at a time; task, jobs and results are pickled. An exception of
    the task is raised here. Raises UserError if a worker is killed. The workers end when the
    generator does.
    """
    jobs, most = iter(jobs), most or available_cores()
    first = list(islice(jobs, FEW))
    jobs = chain(first, jobs)
    if most == 1 or len(first) < FEW:
        yield from map(task, jobs)
        return
    workers: list[_Worker] = []
    own = threading.local()  # each thread has a worker, and waits for it

    def do(job: object) -> object:
        if not hasattr(own, "worker"):
            own.worker = _Worker(task)
            workers.append(own.worker)
        return own.worker.do(job)

    threads, given = ThreadPoolExecutor(most), deque()
    try:
        for job in jobs:
            given.append(threads.submit(do, job))
            if len(given) == 2 * most:
                yield given.popleft().result()
        while given:
            yield given.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.process.kill()
        threads.shutdown()
        for worker in workers:
            worker.process.kill()  # one that was just starting
            worker.process.wait()
            worker.connection.close()


class _Worker:
    """One worker process, seen from here."""

    def __init__(self, task: Callable):
        self.connection, other_end = multiprocessing.Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(other_end.fileno())],
            pass_fds=[other_end.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        other_end.close()
        self.connection.send(task)

    def do(self, job: object) -> object:
        try:
            self.connection.send(job)
            result = self.connection.recv()
        except (EOFError, OSError):
            status = self.process.wait()
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            raise UserError(
                f"a worker process ended {how} before it was done; if memory is short, set a "
                "smaller data.workers"
            ) from None
        if isinstance(result, Exception):
            raise result
        return result


def serve(descriptor: int) -> None:
    """The main function of a worker: does jobs until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends its workers
    connection = Connection(descriptor)
    with suppress(EOFError, OSError):  # the parent is gone
        task = connection.recv()
        while True:
            job = connection.recv()
            try:
                result = task(job)
            except Exception as error:
                error.add_note(f"In a worker process:\n{traceback.format_exc()}")
                result = error
            connection.send(result)
