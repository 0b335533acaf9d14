"""Reader that streams the requests of a trace file.

Invariant: memory does not grow with the file; every malformed row is skipped and reported with its line number, or
ends the reading with that line number, as the caller chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TextIO

from coldstart.lab.traces import formats, tables
from coldstart.lab.traces.formats import Columns
from coldstart.lab.traces.request import TraceError, TraceReport, TraceRequest
from coldstart.lab.traces.tables import Found

FORMATS = ("mooncake", "azure-llm", "azure-functions", "burstgpt", "csv")
DEFAULT_TOKENS = (512, 128)
"""Prompt and output tokens for rows of traces without lengths."""


def read_trace(
    path: Path,
    trace_format: str,
    *,
    columns: Columns | None = None,
    tokens: tuple[int, int] = DEFAULT_TOKENS,
    strict: bool = False,
    report: TraceReport | None = None,
) -> Iterator[TraceRequest]:
    """Yield the file's requests with times relative to its first good row.

    A row that ends before it starts after the first one gets time 0, never a negative one. `strict` raises
    TraceError at the first malformed row; otherwise it is skipped and noted in `report`.
    """
    if trace_format not in FORMATS:
        raise TraceError(f"unknown trace format {trace_format!r}", hint=f"use one of: {', '.join(FORMATS)}")
    return _relative(_read(path, trace_format, columns, tokens, strict, report or TraceReport()))


def _read(
    path: Path,
    trace_format: str,
    columns: Columns | None,
    tokens: tuple[int, int],
    strict: bool,
    report: TraceReport,
) -> Iterator[TraceRequest]:
    try:
        handle = path.open(newline="", encoding="utf-8-sig", errors="replace")
    except OSError as problem:
        raise TraceError(
            f"cannot read the trace {path}: {problem.strerror}", hint="name a trace file that can be read"
        ) from problem
    with handle:
        for line, found in _rows(handle, trace_format, columns, tokens):
            if isinstance(found, ValueError):
                _malformed(path, line, str(found), strict, report)
                continue
            report.rows += 1
            yield found


def _malformed(path: Path, line: int, reason: str, strict: bool, report: TraceReport) -> None:
    if strict:
        raise TraceError(
            f"{path.name}, line {line}: {reason}", hint="fix the row, or allow --on-bad-row skip"
        )
    report.skip(line, reason)


def _rows(handle: TextIO, trace_format: str, columns: Columns | None, tokens: tuple[int, int]) -> Found:
    if trace_format == "mooncake":
        return _json_rows(handle)
    if trace_format == "azure-functions":
        parse = formats.parse_functions(tokens)
        return tables.read(handle, formats.AZURE_FUNCTIONS, tokens, parse, duration="duration")
    chosen = columns or formats.CSV_COLUMNS.get(trace_format)
    if chosen is None:
        raise TraceError(
            "a plain CSV needs a column mapping", hint="--columns time=...,prompt=...,output=..."
        )
    return tables.read(handle, chosen, tokens, formats.csv_parser(chosen, tokens))


def _json_rows(handle: TextIO) -> Found:
    """Parse JSON lines without pandas.

    An object per line is not a table row (hash_ids), and one bad line would reject a whole batch.
    """
    for number, line in enumerate(handle, start=1):
        if line.strip():
            try:
                yield number, formats.parse_mooncake(line)
            except ValueError as problem:
                yield number, problem


def _relative(rows: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    first = next(rows, None)
    if first is None:
        return
    for row in chain([first], rows):
        arrival = max(0.0, row.arrival_s - first.arrival_s)
        yield TraceRequest(arrival, row.prompt_tokens, row.output_tokens, row.model, row.hash_ids)
