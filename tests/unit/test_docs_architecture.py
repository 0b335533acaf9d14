"""The architecture page has the layer table of the architecture test, and each file that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.test_architecture import LAYERS, ROOT

TEXT = (ROOT / "docs/explanation/architecture.md").read_text()


def _place(name: str) -> Path:
    """Where a room's file lies: `artifacts` and `commands` beside the package."""
    return ROOT / name if name.split("/")[0] in ("artifacts", "commands") else ROOT / "coldstart" / name


def test_the_table_of_rooms_is_the_one_that_is_enforced() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", TEXT, re.MULTILINE)
    told = {int(layer): set(re.findall(r"`(\w+)`", rooms)) for layer, rooms in rows}
    assert told == {number: set(rooms) for number, rooms in enumerate(LAYERS, 1)}


def test_every_file_that_it_names_is_there() -> None:
    # Where links lead is held elsewhere, for every page.
    text = re.sub(r"\]\([^)]*\)", "]", TEXT)
    named = set(re.findall(r"\b([a-z_]+(?:/[a-z_]+)*/[\w.]+\.(?:py|md))\b", text)) - {
        "tests/unit/test_architecture.py",
        "tests/unit/test_no_import_cycles.py",
    }
    assert len(named) > 12
    assert [name for name in sorted(named) if not _place(name).is_file()] == []
