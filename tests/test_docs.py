"""README and docs/ agree with the repository: links, keys of configurations, measured figures."""

import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest

from mixer.training.config import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(
        path
        for folder in ("docs", "docker", "dev")
        for path in sorted((ROOT / folder).rglob("*.md"))
    ),
]
USER_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURE = re.compile(r"(?<![\w.,=/-])\d+\.\d{2,}(?![\w.])")  # with two decimals or more
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.?\d*(?:e-?\d+)?")
NO_FIGURES = re.compile(r"arXiv \d+\.\d+|Python 3\.\d+|\]\([^)]*\)")  # the last: where links lead


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
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for script in re.findall(r"python ((?:benchmarks|tests|dev|docs)/\S+\.py)\b", text):
        assert (ROOT / script).exists(), script
    for config in re.findall(r"\b(?:configs|benchmarks/plans)/[\w/]+\.yaml", text):
        assert (ROOT / config).exists(), config


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
def test_each_figure_is_in_a_results_file_that_its_section_links(page):
    """A figure that was edited by hand, or whose file was measured again, is found."""
    for section in re.split(r"\n(?=#+ )", page.read_text()):
        measured = set()
        for link in links(section):
            if "benchmarks/results/" in link:
                measured |= numbers_of((page.parent / link).resolve())
        for figure in FIGURE.findall(NO_FIGURES.sub("", section)):
            decimals = len(figure.partition(".")[2])
            rounded = {round(number, decimals) for number in measured}
            assert float(figure) in rounded, f"{figure} in {section.splitlines()[0]}"


@cache
def numbers_of(result: Path) -> set[float]:
    """All numbers of a result: of its report and of its data."""
    files = [result.with_suffix(suffix) for suffix in (".md", ".json", ".jsonl")]
    text = "\n".join(file.read_text() for file in files if file.exists())
    return {float(number.replace(",", "")) for number in NUMBER.findall(text)}
