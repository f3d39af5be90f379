"""The one exception that speaks to the person at the keyboard, how a program ends with it, and
other errors in a line.
"""

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """Something a person can mend: the message says what was given, what is allowed and what to do.

    Every command prints it as `error: ...` without a traceback and exits with status 2, see
    `run_command`.
    """


def run_command(main: Callable[[], None]) -> None:
    """Runs a command's `main` and exits: status 0, or 2 with the message of a UserError on stderr.

    Of several processes of a launch, the first speaks: what is wrong before they meet is wrong in
    all of them.
    """
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def first_line(error: Exception) -> str:
    """Its kind and what it says first, without advice and traces; where that line announces the
    next one, both.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    return f"{type(error).__name__}: {' '.join(said)}"
