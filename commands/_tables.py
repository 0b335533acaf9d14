"""Fit tables and prose into the columns of a terminal without breaking a word.

A table gets wrapped cells, or else one line per cell.
"""

import io
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP = "  "


def find_width() -> int | None:
    """Return the number of columns of the terminal that shows standard output, None without one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class Verbatim(str):
    """Text for another program, such as a manifest or a log: it is not wrapped."""

    __slots__ = ()


def wrap(text: str) -> str:
    """Return the text with lines wrapped at spaces to the width of the terminal; unchanged without one.

    A line of a label and a value, with two spaces between them, continues below its value.
    """
    width = find_width()
    if width is None or isinstance(text, Verbatim):
        return text
    return "\n".join(_wrap_line(line, width) for line in text.splitlines())


def _wrap_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = re.match(r" *(?:\S+(?: \S+)*  +)?", line)
    indent = len(label[0]) if label else 0
    indent = indent if indent <= width // 2 else len(line) - len(line.lstrip()) + len(GAP)
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def fit(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int) -> str:
    """Return the table with cells wrapped at spaces; if a row of its longest words exceeds `width`, one line per cell."""
    longest = [_find_longest(column) for column in zip(headers, *rows, strict=True)]
    if sum(longest) + len(GAP) * (len(headers) - 1) > width:
        return _list_cells(headers, rows)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, len(GAP), 0, 0), pad_edge=False, header_style="")
    for header, is_right, least in zip(headers, right, longest, strict=True):
        grid.add_column(Text(header), justify="right" if is_right else "left", min_width=least)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _find_longest(cells: Sequence[str]) -> int:
    return max((len(word) for cell in cells for word in cell.split()), default=0)


def _list_cells(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    name = max(map(len, headers))
    blocks = (
        "\n".join(
            f"{header.ljust(name)}{GAP}{cell}".rstrip() for header, cell in zip(headers, row, strict=True)
        )
        for row in rows
    )
    return "\n\n".join(blocks)
