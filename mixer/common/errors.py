"""The exception for errors that the user can fix, how a command ends with one, and one-line
summaries of other errors.
"""

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """An error that the user can fix. The message says what was given, what is allowed and what to
    do.

    Commands print it as `error: ...` without a traceback and exit with status 2 (`run_command`).
    """


def run_command(main: Callable[[], None]) -> None:
    """Runs a command's `main`; on a UserError prints its message to stderr and exits with status 2.

    In a launch of several processes only rank 0 prints: what fails before the processes connect
    fails in all of them alike.
    """
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def first_line(error: Exception) -> str:
    """The error's type and the first line of its message, without the advice and traces below it.

    Where the first line ends in a colon, the second line follows.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    return f"{type(error).__name__}: {' '.join(said)}"
