"""Trace formats: conversion of one row to a request.

Invariant: a parser returns a row with usable numbers, or raises ValueError with the reason. Times are in seconds on
the trace's own clock; the reader makes them relative.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from coldstart.lab.traces.request import TraceError, TraceRequest

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a CSV by meaning. `time_unit` is seconds per unit of a numeric time column."""

    time: str
    prompt: str | None
    output: str | None
    model: str | None = None
    time_unit: float = 1.0

    def named(self) -> Iterator[str]:
        """Yield the columns that a trace must have."""
        yield from (c for c in (self.time, self.prompt, self.output, self.model) if c)

    @classmethod
    def parse(cls, text: str) -> Columns:
        """Parse 'time=T,prompt=P,output=O[,model=M][,unit=ms|s|us]'. Raises TraceError."""
        units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
        pairs = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
        missing = {"time", "prompt", "output"} - pairs.keys()
        unknown = pairs.keys() - {"time", "prompt", "output", "model", "unit"}
        if missing or unknown or pairs.get("unit", "s") not in units:
            raise TraceError(
                f"column mapping {text!r}: missing {sorted(missing)}, unknown {sorted(unknown)}",
                hint="write it as time=COLUMN,prompt=COLUMN,output=COLUMN[,model=COLUMN][,unit=s|ms|us]",
            )
        unit = units[pairs.get("unit", "s")]
        return cls(pairs["time"], pairs["prompt"], pairs["output"], pairs.get("model"), unit)


AZURE_LLM = Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE_FUNCTIONS = Columns("end_timestamp", None, None, "func")
BURSTGPT = Columns("Timestamp", "Request tokens", "Response tokens", "Model")
CSV_COLUMNS = {"azure-llm": AZURE_LLM, "azure-functions": AZURE_FUNCTIONS, "burstgpt": BURSTGPT}


def parse_mooncake(line: str) -> TraceRequest:
    """Parse one JSON object: timestamp in milliseconds, input_length, output_length, hash_ids, optional model."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    missing = {"timestamp", "input_length", "output_length"} - row.keys()
    if missing:
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    hashes = row.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(isinstance(h, int) for h in hashes):
        raise ValueError("hash_ids is not a list of integers")
    seconds = _seconds(row["timestamp"], 1e-3)
    tokens = _tokens(row["input_length"], "input_length"), _tokens(row["output_length"], "output_length")
    return TraceRequest(seconds, *tokens, row.get("model"), tuple(hashes))


def csv_parser(columns: Columns, tokens: tuple[int, int]) -> Callable[[Row], TraceRequest]:
    """Return a parser for rows with these columns; `tokens` (prompt, output) replace lengths that the trace lacks."""

    def parse(row: Row) -> TraceRequest:
        prompt = _tokens(_cell(row, columns.prompt), columns.prompt) if columns.prompt else tokens[0]
        output = _tokens(_cell(row, columns.output), columns.output) if columns.output else tokens[1]
        model = _cell(row, columns.model) if columns.model else None
        return TraceRequest(_seconds(_cell(row, columns.time), columns.time_unit), prompt, output, model)

    return parse


def parse_functions(tokens: tuple[int, int]) -> Callable[[Row], TraceRequest]:
    """Return a parser for Azure Functions 2021: a row arrives at end_timestamp - duration; its function is its model."""
    parse = csv_parser(AZURE_FUNCTIONS, tokens)

    def started(row: Row) -> TraceRequest:
        end = parse(row)
        start = end.arrival_s - _seconds(_cell(row, "duration"), 1.0)
        return TraceRequest(start, end.prompt_tokens, end.output_tokens, end.model)

    return started


def _cell(row: Row, column: str) -> str:
    value = row.get(column)
    if value is None or not value.strip():
        raise ValueError(f"has no value for {column}")
    return value.strip()


def _seconds(value: object, unit: float) -> float:
    """Return a number times `unit`, or an ISO-like date (up to seven fraction digits) as seconds since 1970."""
    try:
        seconds = float(str(value)) * unit
    except ValueError:
        return _date(str(value))
    if not math.isfinite(seconds):
        raise ValueError(f"time {value!r} is not finite")
    return seconds


def _date(text: str) -> float:
    head, _, fraction = text.partition(".")
    digits = fraction[:6].rstrip("Z")
    try:
        moment = datetime.fromisoformat(f"{head}.{digits:0<6}" if digits else head)
    except ValueError:
        raise ValueError(f"time {text!r} is neither a number nor a date") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(value: object, name: str | None) -> int:
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError(f"{name} {value!r} is not a number") from None
    if not number.is_integer() or number < 1:
        raise ValueError(f"field {name}: {value!r} is not a whole number above zero")
    return int(number)
