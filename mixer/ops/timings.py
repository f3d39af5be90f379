"""The table of times of `cuda` and `panels` measured on this machine; backend `auto` chooses by it.

`python -m mixer.ops.tune` measures and writes it. The kernels' cache holds one file for each GPU
and each build of the kernels: other kernels, or another GPU, have no times until they are measured.
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

# mixer.ops.build is imported inside functions: `python -m mixer.ops.build` must not find its own
# module already imported.

logger = logging.getLogger("mixer.ops")


@dataclass(frozen=True)
class Case:
    """What decides how long a call takes. `kernels`: the set of our kernels that serves, by the
    compute capability that it is written for (0: the portable set).
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
            f"{self.dtype}{' as tf32' if self.tf32 else ''}, {self.batch} x {self.tokens} tokens, "
            f"{self.channels} channels, {self.heads} heads, kernel size {self.taps}: "
            f"cuda {self.cuda_ms:.3f} ms, panels {self.panels_ms:.3f} ms"
        )


def table_path(device: str, library: str) -> Path:
    """The file, which need not exist, for a GPU (its name) and a build of the kernels (the name of
    its directory).
    """
    from mixer.ops import build

    gpu = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return build.cache_path() / f"tuned-{gpu}-{library}.json"


def write(path: Path, rows: list[Row], facts: dict) -> None:
    """Writes the table. `facts` tell a person who reads it what was measured."""
    table = facts | {"rows": [dataclasses.asdict(row) for row in rows]}
    write_text(path, json.dumps(table, indent=1) + "\n")


@functools.cache
def read(path: Path) -> tuple[Row, ...]:
    """The measured rows; none without a table. A table that cannot be read is ignored, with a
    warning.
    """
    try:
        return tuple(parse_row(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning(
            f"ignoring the measured times in {path}, which cannot be read "
            f"({type(error).__name__}: {error}); measure anew with `python -m mixer.ops.tune`"
        )
        return ()


def parse_row(values: dict) -> Row:
    """Raises TypeError or ValueError if a value is missing, unknown, of a wrong type or
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
    """The row of the same type and kernels whose sizes are nearest (the product of the factors by
    which they differ is least); None if there is none of this type and kernels.
    """

    def kind(case: Case) -> tuple:
        return case.dtype, case.tf32, case.kernels

    def sizes(case: Case) -> tuple[int, ...]:
        return case.tokens, case.channels, case.heads, case.taps

    def distance(row: Row) -> float:
        pairs = zip(sizes(row), sizes(case), strict=True)
        return sum(abs(math.log2(measured / wanted)) for measured, wanted in pairs)

    return min((row for row in rows if kind(row) == kind(case)), key=distance, default=None)
