"""README repeats figures of the benchmarks' pages, and no others."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
_FIGURE = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?%?")
_ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<figures>[^|]*\d[^|]*) \|$", re.MULTILINE)
PAGES = "\n".join(page.read_text() for page in (ROOT / "docs" / "benchmarks").glob("*.md"))
KNOWN = set(_FIGURE.findall(PAGES))
RESULTS = (ROOT / "README.md").read_text().partition("## Results")[2].partition("\n## ")[0]
ROWS = {row["what"]: row["figures"] for row in _ROW.finditer(RESULTS)}


def test_the_table_of_results_is_found() -> None:
    assert len(ROWS) >= 8


@pytest.mark.parametrize("what", ROWS)
def test_a_figure_of_readme_stands_on_a_benchmark_s_page(what: str) -> None:
    assert set(_FIGURE.findall(ROWS[what])) <= KNOWN


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
