"""Real processes of Python programs that start at once: forked from one that has already imported
everything.

A program takes seconds to import what it needs, for each process of each test. Here a process is
forked and runs the program as `python` does, or, as a rank of train.py, with the environment that
torchrun gives; signals, files and exits are as ever.
"""

import faulthandler
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start_process(target: Callable, *arguments) -> multiprocessing.Process:
    """A function, in a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mixer.training.loop", "launching"])
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _enter(directory: str, environment: dict[str, str], output: str) -> None:
    """Gives a forked process a group, a directory and an environment of its own; what it prints
    goes to a file.
    """
    # A daemon, which ends with the tests, may have no children; a program may.
    multiprocessing.current_process()._config["daemon"] = False
    os.setpgid(0, 0)
    os.chdir(directory)
    sys.path.insert(0, str(ROOT))
    os.environ.pop("COLUMNS", None)  # by readline, which pytest imports: no terminal is meant
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR2)  # a rank that hangs can be asked where
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # as Python


def _rank(
    program: str,
    arguments: list[str],
    environment: dict[str, str],
    output: str,
    before: Callable | None,
) -> None:
    """What a forked rank of train.py or eval.py does; `before` may change what it is about to
    run.
    """
    from mixer.common.errors import run_command

    _enter(str(ROOT), environment, output)
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded and os.environ["ACCELERATE_USE_CPU"] == "true":
        _shard_on_cpu()
    if before:
        before()
    sys.argv = [f"{program}.py", *arguments]
    run_command(importlib.import_module(program).main)


def _shard_on_cpu() -> None:
    """FSDP works over gloo as it does on GPUs, but accelerate switches it on for GPUs alone."""
    from accelerate import Accelerator, DistributedType, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from mixer.distributed import world

    class Sharded(Accelerator):
        def __init__(self, mixed_precision: str, **options):
            super().__init__(mixed_precision=mixed_precision, **options)
            self.state.fsdp_plugin = FullyShardedDataParallelPlugin()
            for state in (self.state, PartialState()):
                state.distributed_type = DistributedType.FSDP
            if mixed_precision != "no":
                self.state.fsdp_plugin.set_mixed_precision(mixed_precision)

    world.Accelerator = Sharded


def _program(
    arguments: list[str], environment: dict[str, str], directory: str, output: str
) -> None:
    _enter(directory, environment, output)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def start_python(
    *arguments, output: Path, directory: Path = ROOT, **environment: str
) -> multiprocessing.Process:
    """`python SCRIPT ...` or `python -m MODULE ...`; what it prints, errors too, goes to a file."""
    words = [str(argument) for argument in arguments]
    return start_process(_program, words, environment, str(directory), str(output))


def run_python(
    *arguments, output: Path, directory: Path = ROOT, patience: float = 120, status: int = 0
) -> str:
    """The same, awaited, which must end with this status; returns what it has printed."""
    process = start_python(*arguments, output=output, directory=directory)
    process.join(patience)
    code = process.exitcode
    printed = output.read_text()
    process.kill()
    process.join()
    assert code == status, f"exit code {code}: {printed[-2000:]}"
    return printed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Launch:
    """Ranks of one train.py, or eval.py. `output` is what all of them have printed."""

    def __init__(
        self,
        output: Path,
        *arguments,
        program="train",
        processes=1,
        environment: dict | None = None,
        before=None,
    ):
        self.file = output
        output.unlink(missing_ok=True)
        words = [str(argument) for argument in arguments]
        port = str(free_port())
        self.ranks = []
        for rank in range(processes):
            rank_environment = {}
            if processes > 1:
                rank_environment = {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                }
            rank_environment |= environment or {}
            process = start_process(_rank, program, words, rank_environment, str(output), before)
            self.ranks.append(process)

    @property
    def output(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def running(self) -> bool:
        return any(rank.is_alive() for rank in self.ranks)

    def until(self, condition: Callable[[], bool], patience: float = 60) -> "Launch":
        """Waits for something that the run is to bring about."""
        deadline = time.monotonic() + patience
        while not condition():
            assert self.running() and time.monotonic() < deadline, (
                f"did not happen in {patience} s: {self.output}"
            )
            time.sleep(0.005)
        return self

    def signal(self, number: int, rank: int = 0) -> "Launch":
        os.kill(self.ranks[rank].pid, number)
        return self

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()

    def wait(self, patience: float = 120) -> list[int]:
        """The exit code of each rank; as under torchrun, one that fails takes the others with it,
        after a while.
        """
        deadline = time.monotonic() + patience
        while self.running() and time.monotonic() < deadline:
            if any(rank.exitcode not in (None, 0) for rank in self.ranks):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.005)
        for rank in self.ranks:
            if rank.is_alive():
                os.kill(rank.pid, signal.SIGUSR2)
                time.sleep(0.5)  # in which it prints its stack
                rank.kill()
            rank.join()
        return [rank.exitcode for rank in self.ranks]

    def succeed(self, patience: float = 120) -> str:
        codes = self.wait(patience)
        assert set(codes) == {0}, f"exit codes {codes}: {self.output}"
        return self.output

    def stop(self) -> str:
        """SIGTERM to the first rank, and what was printed up to the end."""
        return self.signal(signal.SIGTERM).succeed()
