"""How functions tell people what they do: line by line, to the `say` that they are given.

That of a training run prints on its main process alone.
"""

import sys
from collections.abc import Callable

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """For commands whose stdout is their result."""
    print(line, file=sys.stderr, flush=True)
