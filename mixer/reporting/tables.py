"""Tables and lists in Markdown, which a terminal shows without breaking lines: they are at most
WIDTH columns wide.
"""

import textwrap

WIDTH = 100


def table(rows: list[dict], keys: int = 1) -> str:
    """A Markdown table of rows that map the columns' titles to text or numbers.

    The titles are those of the first row. The first `keys` columns name a row. The very first is
    aligned to the left, the others to the right. Columns that do not fit into WIDTH go into
    further tables, which begin with the columns that name the rows.
    """
    columns = [[title, *(format_number(row[title]) for row in rows)] for title in rows[0]]
    widths = [max(3, *map(len, column)) for column in columns]
    parts = [list(range(keys))]
    for number in range(keys, len(columns)):
        if len(parts[-1]) > keys and sum(widths[n] + 3 for n in [*parts[-1], number]) >= WIDTH:
            parts.append(list(range(keys)))
        parts[-1].append(number)
    return "\n\n".join(
        _lines([columns[n] for n in part], [widths[n] for n in part]) for part in parts
    )


def _lines(columns: list[list[str]], widths: list[int]) -> str:
    left, *others = widths
    lines = [list(line) for line in zip(*columns, strict=True)]
    lines.insert(1, ["-" * left, *("-" * (width - 1) + ":" for width in others)])
    padded = ([line[0].ljust(left), *map(str.rjust, line[1:], others)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def bullets(lines: list[str]) -> str:
    """A Markdown list."""
    return "\n".join(wrapped(line, "- ", "  ") for line in lines)


def wrapped(text: str, first: str = "", others: str = "") -> str:
    """Text in lines of at most WIDTH columns, which begin with `first` and `others`."""
    return textwrap.fill(
        text,
        WIDTH - 10,  # room for an indent
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def format_number(value: str | float | None) -> str:
    """A table's cell: text as it is, small numbers as 1e-07, large ones whole, others with four
    decimals.

    None stands for a perplexity too large for fp64.
    """
    if value is None:
        return "over 1e308"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1e3:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.1g}"
