"""Parts of pages that are made from committed results, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, load

Row = Mapping[str, Any]
Cell = str | Callable[[Any], object]
"""A format string over a mapping, such as "{gap[worst_s]:.2f} s", or a function of it."""


@dataclass(frozen=True)
class Table:
    """A Markdown table: the rows in a result, and a cell for each column title."""

    rows: Callable[[Any], Iterable[Any]]
    columns: Mapping[str, Cell]


Block = Table | Cell


@dataclass(frozen=True)
class Part:
    """The text between two marks of a page: blocks made from a result, separated by empty lines, if it was measured."""

    page: str
    mark: str
    result: str
    blocks: tuple[Block, ...]

    def text(self, results: Path = RESULTS) -> str:
        """Return the blocks."""
        result = load(self.result, results)
        return "\n\n".join(fill(block, result) for block in self.blocks) if result else "Not measured yet."


def fill(block: Block, result: Any) -> str:
    """Return a block, or a cell, as Markdown."""
    if not isinstance(block, Table):
        return str(block(result)) if callable(block) else block.format_map(result)
    lines = [f"| {' | '.join(block.columns)} |", "|---" * len(block.columns) + "|"]
    for row in block.rows(result):
        lines.append(f"| {' | '.join(fill(cell, row) for cell in block.columns.values())} |")
    return "\n".join(lines)


def judge(holds: bool) -> str:
    """Return the verdict on a target."""
    return "met" if holds else "**not met**"


def join(values: Iterable[object]) -> str:
    """Return the values separated by commas."""
    return ", ".join(map(str, values))


def replace(text: str, mark: str, content: str) -> str:
    """Return `text` with the part between the marks replaced. Raises ValueError without the marks."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    head, tail = text.index(begin), text.index(end)
    return f"{text[:head]}{begin}\n{content}\n{text[tail:]}"
