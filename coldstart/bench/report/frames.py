"""Tables of results as pandas frames, and the writer of their chunks as CSV.

Invariant: all chunks of a table have the columns and types that it declares. pandas is imported only when a chunk is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Table:
    """A table: `columns` maps names to pandas types ("Float64", "Int64", "string", "boolean": all support missing values).

    `chunks` is called once for each file and yields frames that have at least these columns.
    """

    columns: Mapping[str, str]
    chunks: Callable[[], Iterator[DataFrame]]

    @classmethod
    def create(cls, columns: Mapping[str, str], rows: Sequence[Row]) -> Table:
        """Create a table whose rows fit in memory."""

        def chunks() -> Iterator[DataFrame]:
            import pandas

            yield pandas.DataFrame.from_records([dict(row) for row in rows], columns=list(columns))

        return cls(columns, chunks)

    def typed(self) -> Iterator[DataFrame]:
        """Yield the chunks with these columns in this order and type."""
        for chunk in self.chunks():
            yield chunk[list(self.columns)].astype(dict(self.columns))

    def texts(self) -> Iterable[list[str]]:
        """Yield the rows as text for a page or a Markdown table, "-" for a missing value."""
        for chunk in self.typed():
            for row in chunk.astype("object").itertuples(index=False):
                yield [_text(value) for value in row]


def write_csv(table: Table, out: IO[str]) -> None:
    """Write the header and one line per row; a missing value is empty."""
    header = True
    for chunk in table.typed():
        chunk.to_csv(out, index=False, header=header, lineterminator="\n")
        header = False
    if header:
        out.write(",".join(table.columns) + "\n")


def _text(value: Any) -> str:
    from pandas import isna

    if isna(value):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
