"""The pages show the committed results: every table is written from its result file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.common import RESULTS, ROOT

SCHEDULING = "benchmarks/SCHEDULING.md"
PAGES = list(dict.fromkeys(part.page for part in tables.parts()))


@pytest.mark.parametrize("page", PAGES)
def test_page_equals_the_rendered_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text == tables.render(page, text)


def test_every_page_with_results_is_rendered() -> None:
    assert set(PAGES) == {
        "README.md",
        "docs/index.md",
        "docs/tutorial/first-bundle.md",
        "docs/tutorial/first-fast-start.md",
        "docs/tutorial/real-model.md",
        *tables.QUOTED,
        "docs/reference/fleet-measurements.md",
        "docs/reference/host-measurements.md",
        "benchmarks/RESULTS.md",
        "benchmarks/MODEL_CACHE.md",
        SCHEDULING,
    }


def test_every_result_is_quoted_by_a_page_or_read_by_a_benchmark() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    modules = [*(ROOT / "benchmarks").rglob("*.py")]
    text = "".join(path.read_text() for path in [*pages, *modules])
    shown = {part.result for part in tables.parts()}
    unused = [
        path.name for path in RESULTS.glob("*.json") if path.stem not in shown and path.name not in text
    ]
    assert unused == []


def test_replace_fails_when_the_marks_are_missing() -> None:
    with pytest.raises(ValueError, match="cold-start"):
        tables.replace("no marks here", "cold-start", "| table |")


Edit = Callable[[str, Callable[[Any], None]], str]


@pytest.fixture
def rerun(tmp_path: Path) -> Edit:
    """Return a function that renders SCHEDULING.md after a rerun that changed one result file."""
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)

    def edited(name: str, change: Callable[[Any], None]) -> str:
        result = json.loads((tmp_path / f"{name}.json").read_text())
        change(result)
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
        return tables.render(SCHEDULING, (ROOT / SCHEDULING).read_text(), tmp_path)

    return edited


def test_figure11_verdict_changes_when_the_paper_is_reached(rerun: Edit) -> None:
    def quick(result: Any) -> None:
        for one in result["models"]:
            one["ours_over"]["fcfs"] = result["paper_over_fcfs"][0] - 0.75

    def reached(result: Any) -> None:
        for one in result["models"][:1]:
            one["ours_over"]["fcfs"] = result["paper_over_fcfs"][1] + 0.75

    assert "1.25x (OPT-13B), 1.25x (OPT-66B), 1.25x (OPT-175B): **not reproduced**" in rerun(
        "figure11", quick
    )
    text = rerun("figure11", reached)
    assert "4.75x (OPT-13B), 1.25x (OPT-66B), 1.25x (OPT-175B): reproduced for OPT-13B" in text


def test_figure15_share_of_swapping_is_judged_by_the_bound_of_the_paper(rerun: Edit) -> None:
    def share(percent: float) -> Callable[[Any], None]:
        def change(result: Any) -> None:
            for row in result["rows"]:
                row["proactive_percent"]["swapping"] = percent

        return change

    assert "swapping 1 to 1 % of latency: within the paper's bound" in rerun("figure15", share(1.0))
    assert "swapping 77 to 77 % of latency: **above the paper's bound" in rerun("figure15", share(77.0))


def test_figure7_averages_are_exact_when_the_printed_digits_agree(rerun: Edit) -> None:
    def change(fcfs: float) -> Callable[[Any], None]:
        return lambda result: result["best"]["averages"].update(fcfs=fcfs)

    assert "; exact." in rerun("figure7", change(4.2304))
    assert "; not exact: on the grids tried fcfs comes to" in rerun("figure7", change(4.24))


def test_a_part_names_its_benchmark_when_the_result_is_missing(rerun: Edit, tmp_path: Path) -> None:
    for name in ("figure8", "figure14"):
        (tmp_path / f"{name}.json").unlink()
    text = rerun("figure7", lambda result: None)
    assert "Not measured yet: `python -m benchmarks scheduling/figures --figure 8`." in text
    assert "Not measured yet: `python -m benchmarks scheduling/figures --figure 14`." in text
