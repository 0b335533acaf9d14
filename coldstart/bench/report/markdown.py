"""Benchmark document as Markdown: the table, machine and versions, and failures; and any table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coldstart.bench.report import rows


def render(document: Mapping[str, Any]) -> str:
    """Return the complete report; cells are escaped so that no reason can break the table."""
    lines = [
        f"# Cold start of {_cell(str(document['model']))}",
        "",
        *table(rows.HEADERS, rows.rows(document)),
        "",
    ]
    if stages := rows.stages(document):
        lines += [*table(rows.STAGE_HEADERS, stages), ""]
    notes = [*rows.verdict(document), *rows.unavailable(document)]
    lines += [f"- {_cell(note)}" for note in notes]
    return "\n".join([*lines, "", provenance(document), ""])


def provenance(document: Mapping[str, Any]) -> str:
    """Return one sentence with date, machine, versions and command."""
    machine = document["machine"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    command = " ".join(document["command_line"])
    return (
        f"Measured {document['date']} on {machine['cpu']}, {machine['cores']} cores, {memory}, "
        f"kernel {machine['kernel']}; {versions}; `{command}`"
    )


def table(headers: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column left-aligned, all others right-aligned."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return [_line(row) for row in [headers, rule, *cells]]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
