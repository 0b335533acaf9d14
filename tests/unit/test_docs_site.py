"""The documentation site has every page of docs/ in its navigation, and every link in every page leads to a file."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STAGE = runpy.run_path(str(DOCS / "_tools/stage.py"))
NAV = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
OUTSIDE = (
    "artifacts/FORMAT.md",
    "benchmarks/RESULTS.md",
    "benchmarks/SCHEDULING.md",
    "benchmarks/MODEL_CACHE.md",
    "examples/README.md",
)
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")


def targets(entry: Any) -> Iterator[str]:
    """Yield the pages of a navigation entry in order."""
    if isinstance(entry, str):
        yield entry
    else:
        for value in entry.values() if isinstance(entry, dict) else entry:
            yield from targets(value)


def test_navigation_names_every_page_once() -> None:
    named = list(targets(NAV))
    assert len(set(named)) == len(named)
    others = {str(STAGE["locate"](ROOT / page).relative_to(STAGE["PAGES"])) for page in OUTSIDE}
    assert set(named) == {*PAGES, *others}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    path = DOCS / page
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).is_file()] == []


def test_stage_rewrites_links_when_they_leave_docs() -> None:
    text = STAGE["rewrite"](DOCS / "how-to/containers.md")
    assert "(../examples/container/Containerfile)" in text
    assert "../../" not in text
