"""Tables in Markdown."""

import re


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, row by row, without the line below the titles."""
    found = re.findall(r"(?:^\|.*\|\n)+", text + "\n", re.MULTILINE)
    cells = [[row.strip("|").split("|") for row in table.splitlines()] for table in found]
    return [
        [[cell.strip() for cell in row] for row in (titles, *rows)] for titles, _, *rows in cells
    ]


def rows(text: str) -> list[list[str]]:
    """The rows of all tables."""
    return [row for table in tables(text) for row in table]
