"""Printing where the reader may go, as a terminal that is closed, or `tee` at Ctrl-C; and how
quantities are printed.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
BOLD = "1"
RED = "31"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Such as "1 step" or "1,000 steps"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def escaped(text: str) -> str:
    """The text with its control characters escaped as Python does, such as \\x1b, but for tabs and
    the ends of lines: in a terminal they would move the cursor, change colours, or erase.
    """
    return CONTROL.sub(lambda character: repr(character[0])[1:-1], text)


def styled(text: str, style: str, stream: "TextIO | LastingStream") -> str:
    """The text in a style, BOLD or RED, where the stream is a terminal that shows it: not a dumb
    one, and not if NO_COLOR is set (no-color.org).
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    if is_plain or stream.closed or not stream.isatty():
        return text
    return f"\x1b[{style}m{text}\x1b[0m"


class LastingStream:
    """A text stream that outlives its reader: what is printed once that has gone is dropped,
    whatever the system calls the error. None, where the shell has closed it, has no reader.
    """

    def __init__(self, stream: TextIO | None):
        self.stream = stream or open(os.devnull, "w")

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _try(self, name: str, *arguments: str) -> None:
        try:
            getattr(self.stream, name)(*arguments)
        except UnicodeError:
            raise
        except (OSError, ValueError):  # ValueError, where Python has closed the file
            self.stream = open(os.devnull, "w")


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, no print, warning, log line or progress bar fails because its reader has gone; nor do
    the flushes at the end of the process, which would change its exit status.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    lasting = {name: LastingStream(stream) for name, stream in before.items()}
    for name, stream in lasting.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in lasting.items():
            stream.flush()  # finds a reader that has gone after the last line
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)
