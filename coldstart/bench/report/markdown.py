"""A bench document as Markdown: the table, what it was measured on, and what did not go well; and any table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coldstart.bench.report import rows


def render(document: Mapping[str, Any]) -> str:
    """The whole report; cells are escaped so that no reason can break the table."""
    lines = [
        f"# Cold start of {_cell(str(document['model']))}",
        "",
        *table(rows.HEADERS, rows.rows(document)),
        "",
    ]
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


def table(headers: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table: its first column to the left, all others to the right."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return [_line(row) for row in [headers, rule, *cells]]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
