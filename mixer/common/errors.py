"""How a command speaks and ends: errors that the user can fix, lines of progress, and which process
of a launch prints them.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

# Functions tell people what they do line by line, to the `say` that they are given.
Say = Callable[[str], None]


class UserError(Exception):
    """An error that the user can fix. The message says what was given, what is allowed and what to
    do.

    Commands print it as `error: ...` without a traceback and exit with status 2 (`run_command`).
    """


class NotFinite(UserError):
    """Numbers of a run are NaN or infinite: its training has diverged. The message says so in the
    words "not finite".
    """


def command_parser(name: str | None, about: str, **how) -> argparse.ArgumentParser:
    """The parser of `python -m NAME`, or of the script itself. `about` is shown as it is."""
    raw = argparse.RawDescriptionHelpFormatter
    prog = f"python -m {name}" if name else None
    return argparse.ArgumentParser(prog, description=about, formatter_class=raw, **how)


def run_command(main: Callable[[], None]) -> None:
    """Runs a command's `main`. On a UserError, or an error of the system such as a full disk,
    prints the message to stderr and exits with status 2; on Ctrl-C with 130.

    In a launch of several processes only rank 0 prints: what fails before the processes connect
    fails in all of them alike.
    """
    sys.excepthook = end_at_interrupt
    if sys.stdout is None:  # the shell has closed it
        sys.stdout = open(os.devnull, "w")
    # What a terminal or a file cannot show, such as the bytes of a path, is written as \x...
    with suppress(OSError):  # where nobody reads what is printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except (UserError, OSError) as error:
        if isinstance(error, OSError):  # perhaps of stdout, and Python writes there once more
            sys.stdout = open(os.devnull, "w")
        say_on_stderr(f"error: {error}")
        sys.exit(2)


def end_at_interrupt(kind, error, trace) -> None:
    """The exception hook of commands: Ctrl-C is a line, and status 130."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, trace)
    say_on_stderr("interrupted")
    os._exit(130)  # nobody waits for its threads


def end_with_parent() -> None:
    """For a process of multiprocessing: SIGTERM when the process that started it has ended, however
    that was.
    """

    def wait() -> None:
        multiprocessing.parent_process().join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def first_line(error: Exception) -> str:
    """The error's type and the first line of its message, without the advice and traces below it.

    Where the first line ends in a colon, the second line follows.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    return f"{type(error).__name__}: {' '.join(said)}"


# ------------------------------------------------------------------------- processes of a launch
# What a launcher such as torchrun sets in the environment. A pod or a job script may set such
# variables too, so a rank counts only where the others fit it.

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
NAMES = (*PLACE, "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether a launcher has started this process."""
    try:
        rank, local_rank, size = (int(os.environ[name]) for name in PLACE)
    except (KeyError, ValueError):
        return False
    return 0 <= local_rank <= rank < size and all(os.environ.get(name) for name in NAMES)


def rank() -> int:
    """0 where no launcher has started this process."""
    return int(os.environ["RANK"]) if is_launched() else 0


def say_on_stderr(line: str) -> None:
    """For commands whose stdout is their result. Of several processes the first one prints."""
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)


def oddity() -> str:
    """What is wrong with the environment where it has a rank, or several processes, without a
    launcher; "" if nothing is.
    """
    given = {name: os.environ[name] for name in NAMES if name in os.environ}
    is_first = "LOCAL_RANK" not in given and given.get("RANK", "0") == "0"
    if is_launched() or (is_first and given.get("WORLD_SIZE", "1") == "1"):
        return ""
    said = " ".join(f"{name}={value}" for name, value in given.items())
    return (
        f"the environment has {said}, as no launcher sets it; allowed: all of {', '.join(NAMES)}, "
        "with LOCAL_RANK <= RANK < WORLD_SIZE, or none; start this with torchrun or accelerate "
        f"launch, or without them: env {' '.join(f'-u {name}' for name in given)} python ..."
    )
