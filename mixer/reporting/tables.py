"""Tables in Markdown, with numbers in one form."""


def table(rows: list[dict]) -> str:
    """A Markdown table of rows that map the columns' titles to text or numbers.

    The titles are those of the first row. The first column is aligned to the left, the others to
    the right.
    """
    titles = list(rows[0])
    alignment = ["---"] + ["---:"] * (len(titles) - 1)
    cells = [[format_number(row[title]) for title in titles] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, alignment, *cells))


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
