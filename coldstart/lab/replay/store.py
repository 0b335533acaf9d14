"""Store of finished requests in a temporary database, so that memory does not grow with the trace.

Invariant: only the database's page cache (2 MB) is in memory; percentiles are exact, read by rank from an index.
SQLite removes the file when the connection closes, also if the process dies.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, overload

from coldstart.bench.report.table import Row, Table
from coldstart.lab.replay.record import RequestRecord

if TYPE_CHECKING:
    from pandas import DataFrame

METRICS = ("ttft_s", "tpot_s", "normalized_s", "latency_s")
"""Metrics of the completed requests."""

LAG = "lag_s"
COLUMNS = (
    "number", "model", "target", "due_s", "sent_s", "first_token_s", "finished_s", "prompt_tokens", "wanted_tokens",
    "output_tokens", "error", *METRICS,
)  # fmt: skip
"""Columns of the exported table."""

_FIELDS = tuple(field.name for field in fields(RequestRecord))
_COLUMNS = (*_FIELDS, "ok", LAG, *METRICS)


class Column(Sequence[float]):
    """Known values of one metric in ascending order; each access queries the database."""

    def __init__(self, database: sqlite3.Connection, name: str, where: str) -> None:
        self._database, self._name, self._where = database, name, f"{name} IS NOT NULL AND {where}"
        database.execute(f"CREATE INDEX IF NOT EXISTS by_{name} ON requests ({name}) WHERE {self._where}")
        self._length, self._mean = self._one(f"COUNT({name}), AVG({name})")

    @property
    def mean(self) -> float:
        """Return the mean. Raises ValueError without values."""
        if self._mean is None:
            raise ValueError(f"no request has a {self._name}")
        return float(self._mean)

    def __len__(self) -> int:
        return int(self._length)

    @overload
    def __getitem__(self, rank: int) -> float: ...

    @overload
    def __getitem__(self, rank: slice) -> list[float]: ...

    def __getitem__(self, rank: int | slice) -> float | list[float]:
        if isinstance(rank, slice):
            return [self[position] for position in range(*rank.indices(len(self)))]
        position = rank + len(self) if rank < 0 else rank
        if not 0 <= position < len(self):
            raise IndexError(rank)
        return float(self._one(self._name, f"ORDER BY {self._name} LIMIT 1 OFFSET {position}")[0])

    def _one(self, what: str, then: str = "") -> tuple[float, ...]:
        asked = f"SELECT {what} FROM requests WHERE {self._where} {then}"
        return tuple(self._database.execute(asked).fetchone())


class RecordStore:
    """Store of all ended requests; iterates in the order of the trace."""

    def __init__(self, records: Iterable[RequestRecord] = ()) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode=OFF")
        self._database.execute(f"CREATE TABLE requests ({', '.join(_COLUMNS)})")
        self._insert = f"INSERT INTO requests VALUES ({', '.join('?' * len(_COLUMNS))})"
        for record in records:
            self.add(record)

    def add(self, record: RequestRecord) -> None:
        """Add a request that has ended, successfully or not."""
        self._database.execute(self._insert, [getattr(record, name) for name in _COLUMNS])

    def column(self, metric: str) -> Column:
        """Return a metric of the completed requests in ascending order; LAG also covers the other requests."""
        return Column(self._database, metric, "1" if metric == LAG else "ok")

    def frames(self, columns: Sequence[str], rows: int = 10_000) -> Iterator[DataFrame]:
        """Yield these columns of all requests in trace order, `rows` at a time: memory does not grow."""
        import pandas

        asked = f"SELECT {', '.join(columns)} FROM requests ORDER BY number"
        yield from pandas.read_sql_query(asked, self._database, chunksize=rows)

    def table(self) -> Table:
        """Return a table with one row per request, the derived metrics last."""
        return Table(COLUMNS, self._rows)

    def _rows(self) -> Iterator[Row]:
        found = self._database.execute(f"SELECT {', '.join(COLUMNS)} FROM requests ORDER BY number")
        return (dict(zip(COLUMNS, row, strict=True)) for row in found)

    def __iter__(self) -> Iterator[RequestRecord]:
        rows = self._database.execute(f"SELECT {', '.join(_FIELDS)} FROM requests ORDER BY number")
        return (RequestRecord(*row) for row in rows)

    def __len__(self) -> int:
        return self._count("1")

    @property
    def completed(self) -> int:
        return self._count("ok")

    @property
    def failed(self) -> int:
        return self._count("error IS NOT NULL")

    @property
    def output_tokens(self) -> int:
        """Return the number of output tokens of the completed requests."""
        row = self._database.execute("SELECT COALESCE(SUM(output_tokens), 0) FROM requests WHERE ok")
        return int(row.fetchone()[0])

    def _count(self, where: str) -> int:
        return int(self._database.execute(f"SELECT COUNT(*) FROM requests WHERE {where}").fetchone()[0])
