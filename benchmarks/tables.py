"""Write the committed results into the pages, and the chart of README: python -m benchmarks tables

Each claim folder has a module `tables` with PARTS. A part names a page, a mark in it (`<!-- mark -->` to `<!-- /mark -->`),
a result file, and the blocks between the marks. No figure in a page is typed by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import replace as replace_field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, load
from benchmarks.start import chart

# Parts that an explanation page repeats, by result and mark.
QUOTED = {"docs/explanation/paraserve.md": (("fleet-cold-ttft", "cold-ttft"),)}
CLAIMS = ("papers", "start", "scheduling", "host", "fleet")
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
    """The text between two marks of a page, made from a result; `benchmark` creates the result if it is missing."""

    page: str
    mark: str
    result: str
    blocks: tuple[Block, ...]
    benchmark: str = ""

    def text(self, results: Path = RESULTS) -> str:
        """Return the blocks, separated by empty lines."""
        result = load(self.result, results)
        if result is None:
            return f"Not measured yet: `python -m benchmarks {self.benchmark}`."
        return "\n\n".join(fill(block, result) for block in self.blocks)


def fill(block: Block, result: Any) -> str:
    """Return a block, or a cell, as Markdown."""
    if not isinstance(block, Table):
        return str(block(result)) if callable(block) else block.format_map(result)
    lines = [f"| {' | '.join(block.columns)} |", "|---" * len(block.columns) + "|"]
    for row in block.rows(result):
        lines.append(f"| {' | '.join(fill(cell, row) for cell in block.columns.values())} |")
    return "\n".join(lines)


def met(holds: bool) -> str:
    """Return the verdict on a target."""
    return "met" if holds else "**not met**"


def listed(values: Iterable[object]) -> str:
    """Return the values separated by commas."""
    return ", ".join(map(str, values))


def replace(text: str, mark: str, content: str) -> str:
    """Return `text` with the part between the marks replaced. Raises ValueError without the marks."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    head, tail = text.index(begin), text.index(end)
    return f"{text[:head]}{begin}\n{content}\n{text[tail:]}"


def parts() -> list[Part]:
    """Return the parts of all claims, and those that explanation pages repeat."""
    own = [part for claim in CLAIMS for part in import_module(f"benchmarks.{claim}.tables").PARTS]
    by_mark = {(part.result, part.mark): part for part in own}
    quoted = [replace_field(by_mark[key], page=page) for page, keys in QUOTED.items() for key in keys]
    return own + quoted


def render(page: str, text: str, results: Path = RESULTS) -> str:
    """Return the text of a page with every part updated."""
    for part in parts():
        if part.page == page:
            text = replace(text, part.mark, part.text(results))
    return text


def main() -> None:
    """Write every page, and the chart of the first one."""
    (ROOT / chart.FILE).write_text(chart.render(load(chart.RESULT)))
    for page in dict.fromkeys(part.page for part in parts()):
        path = ROOT / page
        path.write_text(render(page, path.read_text()))


if __name__ == "__main__":
    main()
