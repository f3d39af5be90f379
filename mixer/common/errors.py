"""How a command reports errors and exits, and which process of a launch this is."""

import argparse
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from mixer.common.terminal import LastingStream

Say = Callable[[str], None]  # tells the user a line of progress


class UserError(Exception):
    """An error that the user can fix. The message says what was given, what is allowed and what to
    do. Commands print it without a traceback and exit with status 2.
    """


class NotFinite(UserError):
    """Numbers of a run are NaN or infinite: its training has diverged."""


def command_parser(name: str | None, about: str, **how) -> argparse.ArgumentParser:
    """The parser of `python -m NAME`, or of the script itself. `about` is shown as it is."""
    raw = argparse.RawDescriptionHelpFormatter
    prog = f"python -m {name}" if name else None
    return argparse.ArgumentParser(prog, description=about, formatter_class=raw, **how)


def run_command(main: Callable[[], None]) -> None:
    """Runs a command's `main`. A UserError or a system error, such as a full disk, becomes a line
    on stderr and exit status 2, also if nobody reads it; Ctrl-C becomes 130. In a launch only
    rank 0 prints.
    """
    sys.excepthook = end_at_interrupt
    _fill_closed_descriptors()
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = LastingStream(sys.stderr)
    # Characters that the output cannot show, such as a path's odd bytes, are written as \x...
    with suppress(OSError):  # if nobody reads the output
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except (UserError, OSError) as error:
        if isinstance(error, OSError):  # perhaps from stdout, which Python would flush again
            sys.stdout = open(os.devnull, "w")
        say_on_stderr(f"error: {error}")
        sys.exit(2)


def _fill_closed_descriptors() -> None:
    """Opens those of stdin, stdout and stderr that the shell has closed: the next file that is
    opened would get their numbers, and what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one


def end_at_interrupt(kind, error, trace) -> None:
    """The exception hook of commands: Ctrl-C is a line, and status 130."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, trace)
    say_on_stderr("interrupted")
    os._exit(130)  # without waiting for threads


def end_with_parent() -> None:
    """Sends SIGTERM to this process of multiprocessing when its parent has ended."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def first_line(error: Exception) -> str:
    """The error's type and the first line of its message, or two lines if the first ends in a
    colon; not the advice and traces below.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    return f"{type(error).__name__}: {' '.join(said)}"


def say_on_stderr(line: str) -> None:
    """For commands whose stdout is their result. Of several processes only rank 0 prints."""
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------- processes of a launch
# A launcher such as torchrun sets all these variables. Pods and job scripts may set some of them.

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
    """0 if no launcher has started this process."""
    return int(os.environ["RANK"]) if is_launched() else 0


def processes() -> int:
    """How many the launcher has started; 1 if none has."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def oddity() -> str:
    """The problem if the environment names a rank but no launcher has set it, else ""."""
    given = {name: os.environ[name] for name in NAMES if name in os.environ}
    place = {name: value for name, value in given.items() if name in PLACE}
    if is_launched() or place.items() <= {"RANK": "0", "WORLD_SIZE": "1"}.items():
        return ""
    said = " ".join(f"{name}={value}" for name, value in given.items())
    return (
        f"the environment has {said}, but no launcher set it; allowed: all of {', '.join(NAMES)}, "
        "with LOCAL_RANK <= RANK < WORLD_SIZE, or none; start this with torchrun or accelerate "
        f"launch, or unset them: env {' '.join(f'-u {name}' for name in given)} python ..."
    )
