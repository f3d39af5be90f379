"""Lines that say how far something is, where nothing else is printed for long."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mixer.common.errors import Say, say_on_stderr

SECONDS = 20.0  # between lines


@contextmanager
def time_reported(
    activity: str, say: Say = say_on_stderr, amount: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Says every SECONDS how long the activity inside has taken, by a thread: nothing inside may
    fork, as a child has no thread to release what this one holds. amount: what is done, in words.
    """
    began = time.perf_counter()
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(SECONDS):
            with suppress(OSError):  # nobody reads the output
                say(f"{activity}: {amount()}{time.perf_counter() - began:.0f} s so far")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
