"""The times measured on this machine, by which backend `auto` chooses.

`python -m mixer.ops.tune` measures and writes a table for all calls. A training run measures its
own case, for runs of the same case. The kernels' cache holds both for each GPU and each build of
the kernels: other kernels, or another GPU, have no times until they are measured.
"""

import dataclasses
import functools
import json
import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from mixer.common.files import write_text
from mixer.models.masked_mixer.plain import BACKENDS

# mixer.ops.build is imported inside functions: `python -m mixer.ops.build` must not find its own
# module already imported.

logger = logging.getLogger("mixer.ops")


@dataclass(frozen=True)
class Case:
    """What decides how long a call takes. `kernels`: the set of our kernels that serves, by the
    compute capability that it is written for (0: the portable set). `key_size`: of keyed mixing;
    0 for the triangular convolution alone.
    """

    dtype: str
    tf32: bool
    kernels: int
    tokens: int
    channels: int
    heads: int
    taps: int
    key_size: int = field(default=0, kw_only=True)

    def describe(self, batch: int) -> str:
        return (
            f"{self.dtype}{' as tf32' if self.tf32 else ''}, {batch} x {self.tokens} tokens, "
            f"{self.channels} channels, {self.heads} heads, kernel size {self.taps}"
            f"{f', keys of {self.key_size}' if self.key_size else ''}"
        )


@dataclass(frozen=True)
class Row(Case):
    """One measured case: milliseconds of a forward and backward. An earlier table has none of
    dense.
    """

    batch: int
    cuda_ms: float
    panels_ms: float
    dense_ms: float | None = None

    @property
    def faster(self) -> str:
        """What a call of the operator takes."""
        return "cuda" if self.cuda_ms <= self.panels_ms else "panels"

    @property
    def fastest(self) -> str:
        """What a training run takes."""
        return min(self.milliseconds, key=self.milliseconds.get)

    @property
    def milliseconds(self) -> dict[str, float]:
        times = {"cuda": self.cuda_ms, "panels": self.panels_ms, "dense": self.dense_ms}
        return {name: ms for name, ms in times.items() if ms is not None}

    def is_of(self, case: Case) -> bool:
        """Whether this very case was measured, whatever the batch."""
        return all(getattr(self, name) == value for name, value in vars(case).items())

    def says(self) -> str:
        return f"{self.describe(self.batch)}: {listed(self.milliseconds)}"


def listed(milliseconds: dict[str, float]) -> str:
    """The time of each backend, for a person."""
    return ", ".join(f"{name} {ms:.3f} ms" for name, ms in milliseconds.items())


def table_path(device: str, library: str, kind: str = "tuned") -> Path:
    """The file, which need not exist, for a GPU (its name) and a build of the kernels (the name of
    its directory). kind: "tuned", the table, or "runs", what runs have measured.
    """
    from mixer.ops import build

    gpu = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return build.cache_path() / f"{kind}-{gpu}-{library}.json"


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
    for column in dataclasses.fields(Row):
        value = getattr(row, column.name)
        if value is None and column.name == "dense_ms":
            continue
        kind = float if column.name == "dense_ms" else column.type
        if type(value) is not kind:
            raise TypeError(f"{column.name} is {value!r}, not of type {kind.__name__}")
        may_be_0 = column.name in ("kernels", "key_size")
        if kind in (int, float) and not may_be_0 and not 0 < value < math.inf:
            raise ValueError(f"{column.name} is {value!r}, not positive")
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


# ------------------------------------------------------------------------- what runs have measured


def recall(path: Path, case: Case, batch: int) -> dict[str, float] | None:
    """Milliseconds of each backend as an earlier run measured them for this very case; None if none
    has, or the file cannot be read.
    """
    times = _read_runs(path).get(_key(case, batch))
    if not isinstance(times, dict) or not times:
        return None
    good = all(type(ms) is float and 0 < ms < math.inf for ms in times.values())
    return times if good and times.keys() <= set(BACKENDS) else None


def remember(path: Path, case: Case, batch: int, milliseconds: dict[str, float]) -> None:
    """Keeps the times for later runs of this case. Raises UserError or OSError where the cache
    cannot be written to.
    """
    from mixer.ops import build

    build.cache_directory()
    runs = _read_runs(path) | {_key(case, batch): milliseconds}
    write_text(path, json.dumps(runs, indent=1) + "\n")


def _key(case: Case, batch: int) -> str:
    return f"{case.describe(batch)}, kernels {case.kernels}"


def _read_runs(path: Path) -> dict:
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return runs if isinstance(runs, dict) else {}
