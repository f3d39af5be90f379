"""The text that reports read (lines of metrics.jsonl) and write: Markdown, in files and pipes WIDTH
columns wide, and in a terminal as narrow as that is, so that it breaks no line.
"""

import json
import math
import shutil
import textwrap
from pathlib import Path

from mixer.common.errors import Say, UserError, say_on_stderr
from mixer.common.files import as_path
from mixer.common.terminal import counted

WIDTH = 100
METRICS = "metrics.jsonl"
# The one form of each quantity in tables; pictures may have fewer decimals.
LOSS = ".4f"  # also of bits per byte
PERPLEXITY = ",.2f"
ACCURACY = ".2%"
TOP1 = ".1%"
COUNT = ",.0f"
SECONDS = ".1f"
SPEED = ",.0f"
MEMORY = ".1f"


def read_metrics(path: str | Path) -> list[dict]:
    """The lines of a metrics.jsonl, or of the one in a run directory; see `readable_lines`."""
    path = as_path(path)
    file = path / METRICS if path.is_dir() else path
    lines = [line for _, line in readable_lines(file, say_on_stderr)] if file.is_file() else []
    if not lines:
        problem = "has no line that can be read" if file.exists() else "does not exist"
        runs = []
        if not file.exists():  # of a checkpoint, or of the folder of all runs
            nearby = [path.parent, *sorted(path.glob("*"))]
            runs = [folder for folder in nearby if (folder / METRICS).is_file()]
        advice = " or ".join(map(str, runs[:4])) or "a run that has logged a step"
        raise UserError(f"{file} {problem}: give {advice}")
    return lines


def readable_lines(path: Path, say: Say) -> list[tuple[str, dict]]:
    """(text, content) of each line that is an object with an integer "step" and finite numbers.
    `say` tells of others, but not of one at the end, which is being written or was cut short.
    """
    texts = path.read_bytes().split(b"\n")
    pairs = [(text, _content(text)) for text in texts]
    damaged = [text for text, line in pairs[:-1] if text.strip() and line is None]
    if damaged:
        reason = 'no JSON object with an integer "step" and finite numbers'
        say(f"{path}: left out {counted(len(damaged), 'line')}, {reason}")
    return [(text.decode(), line) for text, line in pairs if line is not None]


def _content(text: bytes) -> dict | None:
    """What a line holds, None if it is damaged."""
    try:
        line = json.loads(text.decode())
        numbers = all(value is None or math.isfinite(value) for value in line.values())
        return line if numbers and type(line["step"]) is int else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def series(lines: list[dict], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of `key`, by step; the later line holds where a step was logged twice."""
    values = {line["step"]: float(line[key]) for line in lines if line.get(key) is not None}
    return sorted(values), [values[step] for step in sorted(values)]


def shown_width() -> int:
    """How wide text is that is printed, in columns: as the terminal, or WIDTH."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)


def table(rows: list[dict], keys: int = 1, width: int = WIDTH) -> str:
    """A Markdown table of rows that map the columns' titles to text or numbers.

    The titles are those of the first row. The first `keys` columns name a row. Columns that do not
    fit into the width go into further tables, which begin with the columns that name the rows.
    """
    columns = []
    for title in rows[0]:
        cells = [title, *(format_number(row[title]) for row in rows)]
        size = max(3, *map(len, cells))
        is_first = not columns
        rule = "-" * size if is_first else "-" * (size - 1) + ":"
        title, *cells = (cell.ljust(size) if is_first else cell.rjust(size) for cell in cells)
        columns.append([title, rule, *cells])
    tables = [columns[:keys]]
    for column in columns[keys:]:
        table_width = sum(len(title) + len(" | ") for title, *_ in [*tables[-1], column]) + 1
        if table_width > width and len(tables[-1]) > keys:
            tables.append(columns[:keys])
        tables[-1].append(column)
    return "\n\n".join(map(_joined_columns, tables))


def _joined_columns(columns: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def wrapped(text: str, width: int = WIDTH, first_indent: str = "", indent: str = "") -> str:
    """Text in lines of at most `width` columns; `indent` begins all lines but the first."""
    return textwrap.fill(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def in_form(value: float | None, form: str) -> str:
    """A quantity; None stands for a perplexity too large for fp64."""
    if value is None:
        return "over 1e308"
    return f"{value:{form}}" if abs(value) < 1e9 else f"{value:.3e}"


def format_number(value: str | float) -> str:
    """A table's cell: text as it is, small numbers as 1e-07, large ones whole, others with four
    decimals.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1e3:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.1g}"
