"""The pages on the architecture name files that exist, and have the layer table of the architecture test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_architecture import LAYERS, ROOT

PAGES = ROOT / "docs/explanation"


def _place(name: str) -> Path:
    """Return the path of a package; `artifacts` and `commands` are beside `coldstart`."""
    return ROOT / name if name.split("/")[0] in ("artifacts", "commands") else ROOT / "coldstart" / name


def test_layer_table_equals_the_enforced_layers() -> None:
    text = (PAGES / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", text, re.MULTILINE)
    documented = {int(layer): set(re.findall(r"`(\w+)`", packages)) for layer, packages in rows}
    assert documented == {number: set(packages) for number, packages in enumerate(LAYERS, 1)}


@pytest.mark.parametrize("page", ["architecture.md", "life-of-a-start.md"])
def test_named_files_exist(page: str) -> None:
    # Another test checks the links of every page.
    text = re.sub(r"\]\([^)]*\)", "]", (PAGES / page).read_text())
    named = set(re.findall(r"\b([a-z_]+(?:/[a-z_]+)*/[\w.]+\.(?:py|md))\b", text)) - {
        "tests/unit/test_architecture.py",
    }
    assert len(named) > 12
    assert [name for name in sorted(named) if not _place(name).is_file()] == []
