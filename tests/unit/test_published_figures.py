"""The pages show the committed results."""

import json

import pytest

from benchmarks import tables
from benchmarks.common import RESULTS, ROOT, load

PAGES = list(dict.fromkeys(part.page for part in tables.PARTS))


@pytest.mark.parametrize("page", PAGES)
def test_page_equals_the_rendered_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text == tables.render(page, text)


def test_chart_equals_the_rendered_result() -> None:
    assert (ROOT / tables.CHART).read_text() == tables.draw_chart(load(tables.COLD))


def test_every_result_is_quoted_by_a_page_or_read_by_a_benchmark() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    text = "".join(path.read_text() for path in [*pages, *(ROOT / "benchmarks").rglob("*.py")])
    shown = {part.result for part in tables.PARTS}
    assert [x.name for x in RESULTS.glob("*.json") if x.stem not in shown and x.name not in text] == []


def test_every_result_has_its_date_commit_command_and_machine() -> None:
    files = [*RESULTS.glob("*.json"), *(RESULTS / "papers").glob("*.json")]
    wanted = ("date", "commit", "command", "machine")
    lacking = {
        file.name: [key for key in wanted if not json.loads(file.read_text()).get(key)] for file in files
    }
    assert {name: keys for name, keys in lacking.items() if keys} == {}
