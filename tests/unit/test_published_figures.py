"""README, RESULTS.md and SCHEDULING.md show the committed results, not somebody's memory of them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def publish() -> Iterator[ModuleType]:
    # Run as a script it has its own folder on the path.
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("publish", ROOT / "benchmarks" / "publish.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "benchmarks"))


FILES = [
    ("README.md", "readme"),
    ("docs/commands.md", "commands"),
    ("benchmarks/RESULTS.md", "results"),
    ("benchmarks/SCHEDULING.md", "scheduling"),
    ("benchmarks/MODEL_CACHE.md", "model_cache"),
    ("docs/fleet.md", "fleet"),
    ("docs/host.md", "host"),
]


@pytest.mark.parametrize(("name", "filled"), FILES)
def test_figures_are_those_of_the_result_files(publish: ModuleType, name: str, filled: str) -> None:
    text = (ROOT / name).read_text()
    assert text == getattr(publish, filled)(text)


def test_a_text_without_marks_is_refused(publish: ModuleType) -> None:
    with pytest.raises(ValueError, match="cold-start"):
        publish.marked("no marks here", "cold-start", "| table |")


Edit = Callable[[str, Callable[[Any], None]], str]


@pytest.fixture
def rerun(publish: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Edit:
    """SCHEDULING.md after a rerun that changed one result file."""
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(publish.scheduling_tables, "RESULTS", tmp_path)

    def edited(name: str, change: Callable[[Any], None]) -> str:
        result = json.loads((tmp_path / f"{name}.json").read_text())
        change(result)
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
        return str(publish.scheduling((ROOT / "benchmarks" / "SCHEDULING.md").read_text()))

    return edited


def test_a_figure_within_the_papers_is_no_longer_called_otherwise(rerun: Edit) -> None:
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


def test_the_share_of_swapping_is_judged_by_the_papers_bound(rerun: Edit) -> None:
    def share(percent: float) -> Callable[[Any], None]:
        def change(result: Any) -> None:
            for row in result["rows"]:
                row["proactive_percent"]["swapping"] = percent

        return change

    assert "swapping 1 to 1 % of latency: within the paper's bound" in rerun("figure15", share(1.0))
    assert "swapping 77 to 77 % of latency: **above the paper's bound" in rerun("figure15", share(77.0))


def test_averages_of_the_papers_digits_are_exact(rerun: Edit) -> None:
    def found(fcfs: float) -> Callable[[Any], None]:
        return lambda result: result["best"]["averages"].update(fcfs=fcfs)

    assert "; exact |" in rerun("figure7", found(4.2304))
    assert "; not exact: on the grids tried fcfs comes to" in rerun("figure7", found(4.24))


def test_the_ceilings_hold_where_the_overhead_says_so(rerun: Edit) -> None:
    def slow(result: Any) -> None:
        for row in result["rows"]:
            row.update(stock_us=100.0, ours_us=150.0, iteration_us=1e4)
        result["rows"][0].update(running=7, ours_us=777.0)

    text = rerun("scheduler_overhead", slow)
    assert "| 7 | 0 | settled | 100 | 777 |" in text
    assert "- Within twice stock: everywhere but with 7 running (0 waiting, settled)." in text
    assert "- The same, a whole step of stock: everywhere." in text


def test_a_result_that_is_missing_is_said_to_be(rerun: Edit, tmp_path: Path) -> None:
    for name in ("figure8", "figure14", "scheduler_overhead"):
        (tmp_path / f"{name}.json").unlink()
    text = rerun("figure7", lambda result: None)
    assert "| 8 |  | not measured yet | `python benchmarks/figure8.py` |" in text
    assert "Not measured yet: `python benchmarks/figure14.py`." in text
    assert "Not measured yet: `python benchmarks/scheduler_overhead.py`." in text
