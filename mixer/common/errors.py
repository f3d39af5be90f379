"""The exception for errors that the user can fix, how a command ends with one, and one-line
summaries of other errors.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from mixer.common.ranks import say_on_stderr


class UserError(Exception):
    """An error that the user can fix. The message says what was given, what is allowed and what to
    do.

    Commands print it as `error: ...` without a traceback and exit with status 2 (`run_command`).
    """


class NotFinite(UserError):
    """Numbers of a run are NaN or infinite: its training has diverged. The message says so in the
    words "not finite".
    """


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


def first_line(error: Exception) -> str:
    """The error's type and the first line of its message, without the advice and traces below it.

    Where the first line ends in a colon, the second line follows.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    return f"{type(error).__name__}: {' '.join(said)}"
