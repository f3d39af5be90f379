"""Tables and text in Markdown, at most WIDTH columns wide, so that no terminal breaks a line."""

import textwrap

WIDTH = 100


def table(rows: list[dict], keys: int = 1) -> str:
    """A Markdown table of rows that map the columns' titles to text or numbers.

    The titles are those of the first row. The first `keys` columns name a row. Columns that do not
    fit into WIDTH go into further tables, which begin with the columns that name the rows.
    """
    columns = []
    for title in rows[0]:
        cells = [title, *(format_number(row[title]) for row in rows)]
        width, pad, end = max(3, *map(len, cells)), str.rjust, ":"
        if not columns:
            pad, end = str.ljust, "-"
        title, *cells = (pad(cell, width) for cell in cells)
        columns.append([title, "-" * (width - 1) + end, *cells])
    parts = [columns[:keys]]
    for column in columns[keys:]:
        if len(parts[-1]) > keys and sum(len(c[0]) + 3 for c in [*parts[-1], column]) >= WIDTH:
            parts.append(columns[:keys])
        parts[-1].append(column)
    lines = ([f"| {' | '.join(line)} |" for line in zip(*part, strict=True)] for part in parts)
    return "\n\n".join(map("\n".join, lines))


def wrapped(text: str, first: str = "", others: str = "") -> str:
    """Text in lines of at most WIDTH columns, which begin with `first` and `others`."""
    how = {"break_long_words": False, "break_on_hyphens": False}
    how |= {"initial_indent": first, "subsequent_indent": others}
    return textwrap.fill(text, WIDTH - 10, **how)  # room for an indent


def format_number(value: str | float | None) -> str:
    """A table's cell: text as it is, small numbers as 1e-07, large ones whole, others with four
    decimals; None stands for a perplexity too large for fp64.
    """
    if value is None:
        return "over 1e308"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1e3:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.1g}"
