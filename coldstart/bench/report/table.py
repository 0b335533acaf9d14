"""Tables of results, of which CSV, Markdown and pages are three forms."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Table:
    """A table with these columns; `rows` is called once for each file. A row may lack values."""

    columns: Collection[str]
    rows: Callable[[], Iterable[Row]]

    def texts(self) -> Iterator[list[str]]:
        """Yield the rows as text for a page or a Markdown table, "-" for a missing value."""
        for row in self.rows():
            yield [_text(row.get(name)) for name in self.columns]

    def write_csv(self, out: IO[str]) -> None:
        """Write the header and one line per row; a missing value is empty."""
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([row.get(name) for name in self.columns] for row in self.rows())


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
