"""README, RESULTS.md and SCHEDULING.md show the committed results, not somebody's memory of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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
    ("benchmarks/RESULTS.md", "results"),
    ("benchmarks/SCHEDULING.md", "scheduling"),
]


@pytest.mark.parametrize(("name", "filled"), FILES)
def test_figures_are_those_of_the_result_files(publish: ModuleType, name: str, filled: str) -> None:
    text = (ROOT / name).read_text()
    assert text == getattr(publish, filled)(text)


def test_a_text_without_marks_is_refused(publish: ModuleType) -> None:
    with pytest.raises(ValueError, match="cold-start"):
        publish.marked("no marks here", "cold-start", "| table |")
