"""A bench document as Markdown: the table, what it was measured on, and what did not go well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coldstart.measure.report import rows


def render(document: Mapping[str, Any]) -> str:
    """The whole report; cells are escaped so that no reason can break the table."""
    lines = [f"# Cold start of {_cell(str(document['model']))}", "", *_table(document), ""]
    notes = [*rows.verdict(document), *rows.unavailable(document)]
    lines += [f"- {_cell(note)}" for note in notes]
    return "\n".join([*lines, "", provenance(document), ""])


def provenance(document: Mapping[str, Any]) -> str:
    """One sentence: date, machine, versions, command."""
    machine = document["machine"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    command = " ".join(document["command_line"])
    return (
        f"Measured {document['date']} on {machine['cpu']}, {machine['cores']} cores, {memory}, "
        f"kernel {machine['kernel']}; {versions}; `{command}`"
    )


def _table(document: Mapping[str, Any]) -> list[str]:
    rule = ["---", *["---:"] * (len(rows.HEADERS) - 1)]
    return [_line(row) for row in [rows.HEADERS, rule, *rows.rows(document)]]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
