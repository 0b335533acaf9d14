"""The prose check reports each banned expression and each incomplete help text, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import prose

CLEAN = (
    '"""Return the hint of an error."""\n# The client has disconnected.\noption(help="Number of workers.")\n'
)


def found(tmp_path: Path, name: str, text: str) -> list[str]:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return list(prose.find(tmp_path))


def test_find_reports_nothing_when_the_prose_is_plain(tmp_path: Path) -> None:
    assert found(tmp_path, "coldstart/plain.py", CLEAN) == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Return the mend of this error."""',
        "x = 1  # nobody reads this file",
        'error = "the server went away without a reason"',
        'f"{model} is no host: {reason}, and more"',
    ],
)
def test_find_reports_an_expression_when_code_contains_it(tmp_path: Path, text: str) -> None:
    (line,) = found(tmp_path, "commands/odd.py", text)
    assert line.startswith("commands/odd.py:1: ") and ": write " in line


def test_find_skips_code_blocks_when_a_page_has_them(tmp_path: Path) -> None:
    page = "Run this:\n\n```\nnobody\n```\n\nThen whoever reads it knows.\n"
    assert found(tmp_path, "docs/page.md", page) == [
        "docs/page.md:7: 'whoever': write the client, user or process that is meant"
    ]


@pytest.mark.parametrize("text", ["Of each pod", "number of workers."])
def test_find_reports_a_help_when_it_is_incomplete(tmp_path: Path, text: str) -> None:
    (line,) = found(tmp_path, "commands/help.py", f"option(help={text!r})")
    assert "help text without a capital or a full stop" in line
