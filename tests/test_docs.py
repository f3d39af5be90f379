"""README and docs/ agree with the repository: links, keys of configurations, measured figures."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown import tables
from runs import ROOT

from mixer.__main__ import SUMMARIES
from mixer.training.config import RunConfig

PAGES = [
    *ROOT.glob("*.md"),
    *(
        path
        for folder in ("docs", "docker", "dev")
        for path in sorted((ROOT / folder).rglob("*.md"))
    ),
]
USER_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Of a table: 1,234, 6.9%, 0.104 (matmul).
FIGURE = re.compile(r"^([+-]?[\d,.]*)(\d)(%?|%? \(.*\))$")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


@cache
def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, as GitHub makes it."""
    without_code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_link_leads_to_a_file_and_a_heading_that_exist(page):
    for link in links(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_command_and_each_configuration_named_exists(page):
    text = page.read_text()
    for module in re.findall(r"python -m (mixer[.\w]*\w)", text):
        assert find_spec(module), module
    for name in re.findall(r"(?:^ {4}|`)mixer ([a-z]+)", text, re.MULTILINE):
        assert name in SUMMARIES, name
    for script in re.findall(r"python ((?:benchmarks|tests|dev|docs)/\S+\.py)\b", text):
        assert (ROOT / script).exists(), script
    for config in re.findall(r"\b(?:configs|benchmarks/plans)/[\w/]+\.yaml", text):
        assert (ROOT / config).exists(), config


@pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
def test_comparisons_of_one_page_have_outputs_of_their_own(page):
    """With other options, a comparison is refused the output of an earlier one."""
    text = page.read_text().replace("\\\n", "")
    commands = set(re.findall(r"^ {4}(mixer compare .*)$", text, re.MULTILINE))
    outputs = [re.findall(r"--output (\S+)", command) for command in commands]
    assert all(outputs.count(output) == 1 for output in outputs), outputs


@pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
def test_each_key_of_a_configuration_exists(page):
    sections = {item.name: item.type for item in fields(RunConfig) if is_dataclass(item.type)}
    names = "|".join(sections)
    named = re.findall(
        rf"\b({names})\.([a-z_0-9]+)=|`({names})\.(?!py`)([a-z_0-9]+)`", page.read_text()
    )
    for section, key in (match[:2] if match[0] else match[2:] for match in named):
        known = {item.name for item in fields(sections[section])}
        assert key in known, f"{section}.{key}"


@pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
def test_each_row_of_figures_in_a_table_is_a_row_of_the_results_that_it_names(page):
    """A figure that was edited by hand, or whose file was measured again, is found."""
    for row, files in rows_with_figures(page):
        assert is_measured(row, files), f"{' | '.join(row.values())} in {files}"
        for title, cell in row.items():  # and with any figure one off it is not
            other = FIGURE.sub(lambda found: f"{found[1]}{int(found[2]) ^ 1}{found[3]}", cell)
            assert other == cell or not is_measured(row | {title: other}, files)


def rows_with_figures(page: Path) -> list[tuple[dict[str, str], list[Path]]]:
    """Rows of a page's tables by their columns' titles, with the results that a row links, or the
    comment above its table names: <!-- from ../benchmarks/results/FILE.md -->
    """
    found = []
    for block in re.split(r"\n(?=<!-- from)|\n\n", page.read_text()):
        named = re.findall(r"<!-- from (\S+) -->", block)
        for titles, *rows in tables(block):
            for row in rows:
                if any(map(has_figure, row)):
                    linked = [link for link in links(" ".join(row)) if "/results/" in link]
                    files = [(page.parent / file).resolve() for file in linked or named]
                    found.append((dict(zip(titles, row, strict=True)), files))
    return found


def is_measured(row: dict[str, str], files: list[Path]) -> bool:
    """Whether a row of a table in the files is the same in all columns with the same titles, which
    are the first one there, and here all that have figures.
    """
    for titles, *measured in (table for file in files for table in tables(file.read_text())):
        own = [cell for title, cell in row.items() if title not in titles]
        if titles[0] in row and not any(map(has_figure, own)):
            shared = [(titles.index(title), cell) for title, cell in row.items() if title in titles]
            if any(all(cells[n] == cell for n, cell in shared) for cells in measured):
                return True
    return False


def has_figure(cell: str) -> bool:
    return bool(FIGURE.match(cell) or re.search(r"\d\.\d\d", re.sub(r"\]\(.*?\)", "", cell)))


def test_each_message_of_the_faq_is_what_the_code_says():
    messages = re.findall(r"^### `(.+)`$", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)
    assert len(messages) > 20
    said = [text for file in (ROOT / "mixer").rglob("*.py") for text in literals(file)]
    for message in messages:
        assert any(message in text for text in said), message


def literals(file: Path) -> Iterator[str]:
    """The strings of a file, with … for what an f-string fills in."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", "…") for part in node.values)
            yield "".join(part if isinstance(part, str) else "…" for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
