"""Tables in Markdown."""

import re


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, row by row, without the line below the titles."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text + "\n", re.MULTILINE)
    result = []
    for block in blocks:
        titles, _, *lines = block.splitlines()
        result.append([cells(line) for line in (titles, *lines)])
    return result


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows(text: str) -> list[list[str]]:
    """The rows of all tables."""
    return [row for table in tables(text) for row in table]
