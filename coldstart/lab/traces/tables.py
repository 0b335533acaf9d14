"""CSV traces with pandas: batches of lines as columns, or row by row if a batch contains other values than numbers and dates.

Invariants: memory does not grow with the file; both ways return identical requests, so that the row parser
(coldstart.lab.traces.formats) remains the only definition of a row, and gives the reason for each malformed one.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import StringIO
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TextIO

from coldstart.lab.traces.formats import Columns, Row
from coldstart.lab.traces.request import TraceError, TraceRequest

if TYPE_CHECKING:
    from pandas import DataFrame

BATCH = 4096
"""Number of lines that are held at once."""

# Dates that pandas and the row parser interpret identically; the row parser reads all others.
_DATE = r"\d{4}-\d\d-\d\d[ T](?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?Z?"

Parse = Callable[[Row], TraceRequest]
Found = Iterator[tuple[int, TraceRequest | ValueError]]


def read(
    handle: TextIO, columns: Columns, tokens: tuple[int, int], parse: Parse, duration: str | None = None
) -> Found:
    """Yield each row's line number, with its request or the error; `parse` reads a single row.

    `duration` names a column with the seconds between a row's arrival and its time. Raises TraceError for a missing
    column.
    """
    header = _header(handle, [*columns.named(), *([duration] if duration else [])])
    before = 1
    while lines := list(islice(handle, BATCH)):
        if any(line.count('"') % 2 for line in lines):
            # A cell contains a line break: records no longer correspond to lines.
            yield from _by_row(header, chain(lines, handle), parse, before)
            return
        numbers = [before + i for i, line in enumerate(lines, start=1) if line.strip()]
        kept = [line for line in lines if line.strip()]
        try:
            requests = _by_column(_frame(header, kept), columns, tokens, duration)
        except ValueError:  # a malformed row, or one that only the row parser can read
            for number, (_, found) in zip(numbers, _by_row(header, kept, parse, 0), strict=True):
                yield number, found
        else:
            yield from zip(numbers, requests, strict=True)
        before += len(lines)


def _header(handle: TextIO, needed: Sequence[str]) -> list[str]:
    header = [name.strip() for name in next(csv.reader(handle), [])]
    missing = [name for name in needed if name not in header]
    if missing:
        raise TraceError(
            f"the trace has no column {', '.join(missing)}; it has {', '.join(header) or 'no header'}",
            hint="choose another --trace-format, or name the columns with --columns",
        )
    return header


def _by_row(header: Sequence[str], lines: Iterable[str], parse: Parse, before: int) -> Found:
    last = ""

    def watch() -> Iterator[str]:
        nonlocal last
        for line in lines:
            last = line
            yield line

    reader = csv.DictReader(watch(), fieldnames=header)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            yield before + reader.line_num, ValueError(str(problem))
            continue
        # csv skips empty lines, but not lines of spaces.
        if not last.strip() and not any(cell.strip() for cell in row.values() if cell):
            continue
        try:
            yield before + reader.line_num, parse(row)
        except ValueError as problem:
            yield before + reader.line_num, problem


def _frame(header: Sequence[str], lines: Sequence[str]) -> DataFrame:
    """Return the cells of the lines as text. Raises ValueError if they are not a table."""
    from pandas import read_csv

    if not lines:
        raise ValueError("no rows")
    # Select by position: of two columns with the same name the last one counts, as in csv.DictReader.
    places = {name: place for place, name in enumerate(header)}
    frame = read_csv(
        StringIO("".join(lines)),
        header=None,
        usecols=sorted(places.values()),
        names=sorted(places, key=places.__getitem__),
        dtype=object,
        na_filter=False,
        index_col=False,
    )
    if len(frame) != len(lines):
        raise ValueError("lines that are not rows")
    return frame


def _by_column(
    frame: DataFrame, columns: Columns, tokens: tuple[int, int], duration: str | None
) -> Iterator[TraceRequest]:
    """Return the requests. Raises ValueError before the first request if a value is not plain."""
    arrivals = _seconds(frame[columns.time], columns.time_unit)
    if duration:
        arrivals = arrivals - _seconds(frame[duration], 1.0)
    prompts, outputs = (
        _tokens(frame[name]) if name else [usual] * len(frame)
        for name, usual in zip((columns.prompt, columns.output), tokens, strict=True)
    )
    models = _names(frame[columns.model]) if columns.model else [None] * len(frame)
    return map(TraceRequest, arrivals.tolist(), prompts, outputs, models)


def _seconds(cells: Any, unit: float) -> Any:
    """Return float64 values: numbers times `unit`, or dates as seconds since 1970, truncated to microseconds."""
    import numpy as np
    from pandas import to_datetime

    try:
        found = cells.to_numpy().astype(np.float64) * unit
    except ValueError:
        texts = cells.str.strip()
        if not texts.str.fullmatch(_DATE).all():
            raise
        moments = to_datetime(texts, format="ISO8601", utc=True).dt.tz_localize(None)
        found = moments.to_numpy().astype("datetime64[us]").astype(np.int64) / 10**6
    if not np.isfinite(found).all():
        raise ValueError("a time is not finite")
    return found


def _tokens(cells: Any) -> list[int]:
    import numpy as np

    found = cells.to_numpy().astype(np.float64)
    if not ((found >= 1) & (found < 2**53) & (found == np.floor(found))).all():
        raise ValueError("a token count is not an integer above zero")
    return [int(count) for count in found.tolist()]


def _names(cells: Any) -> list[str]:
    # A row that is too short has a missing value here, which is not a string.
    names = [cell.strip() if isinstance(cell, str) else "" for cell in cells]
    if not all(names):
        raise ValueError("a row has no model")
    return names
