"""Times of `cuda` and `panels` measured on this machine, by which backend `auto` chooses: `python
-m mixer.ops.tune` takes them.

One file for each GPU and each build of the kernels lies in the kernels' cache: other kernels, or
another GPU, have no times until they are measured anew.
"""

import dataclasses
import functools
import json
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path

from mixer.common.files import write_text

# mixer.ops.build is imported where it is called: `python -m mixer.ops.build` must not find itself
# imported already.

logger = logging.getLogger("mixer.ops")


@dataclass(frozen=True)
class Case:
    """What decides how long a call takes; `kernels` is which set of ours serves, by compute
    capability (0: the portable one).
    """

    dtype: str
    tf32: bool
    kernels: int
    tokens: int
    channels: int
    heads: int
    taps: int


@dataclass(frozen=True)
class Row(Case):
    """One measured case: milliseconds of a forward and backward."""

    batch: int
    cuda_ms: float
    panels_ms: float

    @property
    def faster(self) -> str:
        return "cuda" if self.cuda_ms <= self.panels_ms else "panels"

    def describe(self) -> str:
        return (
            f"{self.dtype}{' as tf32' if self.tf32 else ''}, {self.batch} x {self.tokens} tokens, {self.channels} channels, "
            f"{self.heads} heads, kernel size {self.taps}: cuda {self.cuda_ms:.3f} ms, panels {self.panels_ms:.3f} ms"
        )


def table_path(device: str, library: str) -> Path:
    """Where the times of a GPU, by its name, and a build of the kernels, by the name of its
    directory, are or would be.
    """
    from mixer.ops import build

    return (
        build.cache_path()
        / f"tuned-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}-{library}.json"
    )


def write(path: Path, rows: list[Row], facts: dict) -> None:
    """`facts` say for people what was measured."""
    write_text(
        path,
        json.dumps(facts | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n",
    )


@functools.cache
def read(path: Path) -> tuple[Row, ...]:
    """The measured rows, none where there is no table. What cannot be read is ignored, with a
    warning.
    """
    try:
        return tuple(parse_row(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning(
            f"ignoring the measured times in {path}, which cannot be read ({type(error).__name__}: {error}); "
            "measure anew with `python -m mixer.ops.tune`"
        )
        return ()


def parse_row(values: dict) -> Row:
    """Raises TypeError or ValueError where a value is missing, unknown, of another type or
    impossible.
    """
    row = Row(**values)
    for field in dataclasses.fields(Row):
        value = getattr(row, field.name)
        if type(value) is not field.type:
            raise TypeError(f"{field.name} is {value!r}, not of type {field.type.__name__}")
        if field.type in (int, float) and field.name != "kernels" and not 0 < value < math.inf:
            raise ValueError(f"{field.name} is {value!r}, not positive")
    return row


def nearest(rows: tuple[Row, ...], case: Case) -> Row | None:
    """The row of the same type and kernels whose sizes differ by the least factor, all factors
    multiplied; None without one.
    """

    def distance(row: Row) -> float:
        pairs = (
            (row.tokens, case.tokens),
            (row.channels, case.channels),
            (row.heads, case.heads),
            (row.taps, case.taps),
        )
        return sum(abs(math.log2(measured / wanted)) for measured, wanted in pairs)

    alike = [
        row
        for row in rows
        if (row.dtype, row.tf32, row.kernels) == (case.dtype, case.tf32, case.kernels)
    ]
    return min(alike, key=distance, default=None)
