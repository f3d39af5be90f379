"""How a command is called, reports errors and exits."""

import argparse
import functools
import io
import multiprocessing
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mixer.common.ranks import rank
from mixer.common.terminal import RED, LastingStream, styled

Say = Callable[[str], None]  # tells the user a line of progress


class UserError(Exception):
    """An error that the user can fix. The message says what was given, what is allowed and what to
    do. Commands print it without a traceback and exit with status 2.
    """


class NotFinite(UserError):
    """Numbers of a run are NaN or infinite: its training has diverged."""


def command_parser(
    name: str, description: str | None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """The parser of a command, by how it is called. The paragraphs of the description are fitted to
    the terminal, but for those with indented lines, as of examples.
    """
    width = max(11, shutil.get_terminal_size().columns - 2)  # as argparse has it
    paragraphs = [
        paragraph
        if "\n " in f"\n{paragraph}"
        else textwrap.fill(paragraph, width, break_on_hyphens=False)
        for paragraph in (description or "").strip().split("\n\n")
    ]
    return argparse.ArgumentParser(
        prog=name,
        description="\n\n".join(paragraphs),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


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
    if isinstance(sys.stdout, io.TextIOWrapper):
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
        say_on_stderr(f"{styled('error:', RED, sys.stderr)} {error}")
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


def end_at_interrupt(error_type, error, traceback) -> None:
    """The exception hook of commands: Ctrl-C is a line, and status 130."""
    if error_type is not KeyboardInterrupt:
        return sys.__excepthook__(error_type, error, traceback)
    say_on_stderr("interrupted")
    os._exit(130)  # without waiting for threads


def end_with_parent() -> None:
    """Sends SIGTERM to this process of multiprocessing when its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def errors_about(name: str) -> Iterator[None]:
    """Inside, a UserError begins with this name, of an option or a run."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def first_line(error: Exception) -> str:
    """The error's type and the first line of its message, or two lines if the first ends in a
    colon; not the advice and traces below.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith(":") else 1
    return f"{type(error).__name__}: {' '.join(lines[:count])}"


def say_on_stderr(line: str) -> None:
    """For commands whose stdout is their result. Of several processes only rank 0 prints."""
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)


@functools.cache
def warn(line: str) -> None:
    """The same line is said once."""
    say_on_stderr(f"warning: {line}")
