"""Read request traces in several formats: validate raw cells column by column, and return requests in order of arrival."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import StringIO
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldstart.errors import UsageError
from coldstart.lab.records import RequestRecord

if TYPE_CHECKING:
    from pandas import DataFrame, Series


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Request of a trace. `arrival_s` is in seconds since the start of the trace.

    `hash_ids` identify the prompt's prefix blocks (Mooncake: 512 tokens each). Equal IDs mean equal tokens.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    model: str | None = None
    hash_ids: tuple[int, ...] = ()

    def create_record(self, number: int, target: str) -> RequestRecord:
        """Return an empty record for this request."""
        return RequestRecord(
            number, self.arrival_s, self.prompt_tokens, self.output_tokens, self.model, target
        )


@dataclass(frozen=True, slots=True)
class BadRow:
    line: int
    reason: str


@dataclass(slots=True)
class TraceReport:
    """Format of a trace, numbers of requests and of skipped rows, and the first 100 skipped rows with reasons."""

    trace_format: str = ""
    rows: int = 0
    skipped: int = 0
    bad_rows: list[BadRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names of a trace format. If there is no column for token counts, rows have DEFAULT_TOKENS.

    `time_unit` is the unit of numeric times, in seconds. `duration` is the column with the seconds from the arrival of a
    request to the time in its row.
    """

    time: str
    prompt: str | None = None
    output: str | None = None
    model: str | None = None
    time_unit: float = 1.0
    duration: str | None = None

    @classmethod
    def parse(cls, text: str) -> Columns:
        """Parse 'time=T,prompt=P,output=O[,model=M][,unit=ms|s|us]'. Raises UsageError if the text is invalid."""
        units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
        pairs = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
        missing = {"time", "prompt", "output"} - pairs.keys()
        unknown = pairs.keys() - {"time", "prompt", "output", "model", "unit"}
        if missing or unknown or pairs.get("unit", "s") not in units:
            raise UsageError(
                f"invalid column mapping {text!r}: expected time=, prompt= and output=, optionally model= and unit=s|ms|us",
                hint="use --columns time=COLUMN,prompt=COLUMN,output=COLUMN[,model=COLUMN][,unit=s|ms|us]",
            )
        unit = units[pairs.get("unit", "s")]
        return cls(pairs["time"], pairs["prompt"], pairs["output"], pairs.get("model"), unit)

    @property
    def required(self) -> list[str]:
        """Return the columns that a trace must have."""
        return [name for name in (self.time, self.prompt, self.output, self.model, self.duration) if name]


DEFAULT_TOKENS = (512, 128)
"""Prompt and output tokens of rows in traces without token counts."""
MOONCAKE_COLUMNS = Columns("timestamp", "input_length", "output_length", None, 1e-3)
TEXT_COLUMNS = Columns("time", "prompt", "output")
"""Columns for data sets of texts in one JSON array; they have no times, so all rows arrive at once."""
CHARACTERS_PER_TOKEN = 4
"""Assumed characters per token of English text, to estimate token counts of texts."""
CSV_FORMATS = {
    "Azure LLM": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "Azure Functions 2021": Columns("end_timestamp", None, None, "func", 1.0, "duration"),
    "BurstGPT": Columns("Timestamp", "Request tokens", "Response tokens", "Model"),
}
FUNCTION_COLUMN, MINUTE_S = "HashFunction", 60
"""Azure Functions 2019: one row per function, and columns 1 to 1440 with its invocations in each minute of a day."""
MAX_INVOCATIONS = 2_000_000
"""Maximum number of requests from Azure Functions 2019; one day of it has hundreds of millions."""


def read_trace(
    path: Path,
    *,
    columns: Columns | None = None,
    report: TraceReport | None = None,
    until_s: float = inf,
    limit: int | None = None,
) -> list[TraceRequest]:
    """Read a trace in order of arrival, with times relative to the first arrival. The format is detected from the content.

    `columns` describes a custom CSV format. Invocation counts are expanded only up to `until_s` seconds and about `limit`
    requests. Invalid rows are skipped and listed in `report`.

    Raises:
        UsageError: The file is unreadable, its format is unknown, or a column is missing.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as problem:
        raise UsageError(
            f"cannot read the trace {path}: {problem.strerror}", hint="check the path and its permissions"
        ) from problem
    report = report or TraceReport()
    is_json = text.lstrip()[:1] in ("", "[", "{")
    header = [] if is_json else [name.strip() for name in next(csv.reader(text[:65536].splitlines()))]
    known = (name for name, one in CSV_FORMATS.items() if set(one.required) <= set(header))
    if columns is not None or (name := next(known, None)):
        report.trace_format = "CSV" if columns else str(name)
        named = columns or CSV_FORMATS[report.trace_format]
        requests, reasons = _build_requests(*_read_csv(text, header, named), named)
    elif {FUNCTION_COLUMN, "1"} <= set(header):
        report.trace_format = "Azure Functions 2019"
        requests, reasons = _expand_invocations(path, text, until_s, limit)
    elif text.lstrip().startswith("["):
        report.trace_format, texts, reasons = _read_json_array(path, text)
        requests, reasons = _build_requests(texts, reasons, TEXT_COLUMNS)
    elif not text.strip() or any(line.startswith("{") for line in text.split("\n")):
        report.trace_format = "Mooncake"
        lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
        cells, reasons = _parse_items(lines, _parse_object, [*MOONCAKE_COLUMNS.required, "model", "hash_ids"])
        requests, reasons = _build_requests(cells.astype(object).fillna(""), reasons, MOONCAKE_COLUMNS)
    else:
        raise UsageError(
            f"{path} has an unknown trace format; its columns are {', '.join(header)}",
            hint="specify the columns: --columns time=COLUMN,prompt=COLUMN,output=COLUMN",
        )
    for line, reason in reasons[reasons.ne("")].items():
        report.skipped += 1
        if report.skipped <= 100:
            report.bad_rows.append(BadRow(int(line), reason))
    report.rows += len(requests)
    requests = requests.sort_values("arrival", kind="stable")
    arrivals = requests["arrival"] - requests["arrival"].min()
    cells = (requests[name].tolist() for name in ("prompt", "output", "model", "hash_ids"))
    return [
        TraceRequest(time, prompt, output, str(model) if model else None, tuple(ids or ()))
        for time, prompt, output, model, ids in zip(arrivals.tolist(), *cells, strict=True)
    ]


def _read_csv(text: str, header: list[str], columns: Columns) -> tuple[DataFrame, Series]:
    """Return the required columns as text by line number, and an empty rejection reason per line."""
    from pandas import Series

    if missing := [name for name in columns.required if name not in header]:
        raise UsageError(
            f"the trace lacks these columns: {', '.join(missing)}; its header is {','.join(header)!r}",
            hint="specify existing columns with --columns",
        )
    positions = [header.index(name) for name in columns.required]
    cells = _parse(
        text,
        header=None,
        skiprows=1,
        names=range(len(header)),
        usecols=positions,
        dtype=str,
        keep_default_na=False,
        skip_blank_lines=False,
    )
    cells = cells[positions].fillna("").apply(lambda column: column.str.strip())
    cells.columns, cells.index = columns.required, cells.index + 2
    cells = cells[cells.ne("").any(axis=1)].astype(object)
    return cells, Series("", cells.index)


def _parse(text: str, **options: Any) -> DataFrame:
    from pandas import read_csv

    try:
        return read_csv(StringIO(text), **options)
    except ValueError as problem:
        raise UsageError(
            f"cannot parse the trace as CSV: {problem}", hint="check the quotes in the CSV file"
        ) from problem


def _expand_invocations(path: Path, text: str, until_s: float, limit: int | None) -> tuple[DataFrame, Series]:
    """Expand an Azure Functions trace of 2019 into one request per invocation. Also return why rows were rejected.

    Arrivals are uniformly random within their minute, with a fixed seed.
    """
    import numpy as np
    from pandas import DataFrame, Series, to_numeric

    table = _parse(text, low_memory=False, usecols=lambda name: name == FUNCTION_COLUMN or name.isdigit())
    names = table.pop(FUNCTION_COLUMN)
    counts = table.apply(to_numeric, errors="coerce").to_numpy("float32")
    is_good = ((counts >= 0) & (counts < 2**24) & (np.floor(counts) == counts)).all(axis=1)
    reasons = Series("", names.index + 2)
    reasons[~is_good] = "an invocation count is not a non-negative integer"
    counts, names = counts[is_good].astype("int32"), names[is_good].astype(str).to_numpy()
    of_minute = counts.sum(axis=0)
    first = int((of_minute > 0).argmax())
    end = first + ceil(min(until_s / MINUTE_S, len(of_minute))) + 1
    if limit is not None:
        end = min(end, int(of_minute.cumsum().searchsorted(limit)) + 1)
    counts = counts[:, first:end]
    if (total := int(counts.sum())) > MAX_INVOCATIONS:
        raise UsageError(
            f"the trace {path} has {total:,} invocations, more than the maximum of {MAX_INVOCATIONS:,}",
            hint="replay a part of the trace with --duration SECONDS or --limit N",
        )
    function, minute = counts.nonzero()
    times = counts[function, minute]
    starts = minute.repeat(times) + np.random.default_rng(0).random(total)
    prompt, output = DEFAULT_TOKENS
    requests = {"arrival": starts * MINUTE_S, "prompt": prompt, "output": output, "hash_ids": None}
    return DataFrame(requests | {"model": names[function.repeat(times)]}), reasons


def _read_json_array(path: Path, text: str) -> tuple[str, DataFrame, Series]:
    """Return the format, the estimated token counts of each item of a JSON array, and why items were rejected."""
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise UsageError(
            f"cannot parse the trace {path} as JSON: {problem}",
            hint="use a JSON file in the format of ShareGPT or Alpaca",
        ) from problem

    def count_tokens(item: Any) -> dict[str, Any]:
        try:
            if "instruction" in item:
                parts = filter(None, (item["instruction"], item.get("input")))
                prompt, output = "\n".join(parts), item["output"]
            else:  # the first two turns, as in vLLM's own benchmark
                prompt, output = (turn["value"] for turn in item["conversations"][:2])
            lengths = (ceil(len(one) / CHARACTERS_PER_TOKEN) for one in (prompt, output))
            return dict(zip(TEXT_COLUMNS.required, (0, *lengths), strict=True))
        except (KeyError, TypeError, ValueError):
            raise ValueError("the item has no prompt or no response") from None

    cells, reasons = _parse_items(enumerate(texts, start=1), count_tokens, TEXT_COLUMNS.required)
    is_alpaca = any("instruction" in one for one in texts[:1] if isinstance(one, dict))
    return "Alpaca" if is_alpaca else "ShareGPT", cells, reasons


def _parse_items(
    items: Iterable[tuple[int, Any]], read: Callable[[Any], dict[str, Any]], columns: list[str]
) -> tuple[DataFrame, Series]:
    """Apply `read` to each numbered item. Return the rows, and the messages of items that it cannot read."""
    from pandas import DataFrame, Series

    rows, reasons = dict[int, dict[str, Any]](), dict[int, str]()
    for number, item in items:
        try:
            rows[number], reasons[number] = read(item), ""
        except (ValueError, RecursionError) as problem:
            rows[number], reasons[number] = {}, str(problem)
    return DataFrame.from_dict(rows, orient="index").reindex(columns=columns), Series(reasons, dtype=str)


def _parse_object(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("the line is not a JSON object")
    hashes = row.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(isinstance(one, int) for one in hashes):
        raise ValueError("hash_ids is not a list of integers")
    return row


def _build_requests(cells: DataFrame, reasons: Series, columns: Columns) -> tuple[DataFrame, Series]:
    """Parse the cells. Return the requests in the valid rows as columns, and why rows were rejected."""
    from pandas import DataFrame

    arrival = _parse_times(cells[columns.time], columns.time_unit, reasons)
    if columns.duration:
        arrival = arrival - _parse_times(cells[columns.duration], 1.0, reasons)
    counts = []
    for name, default in zip((columns.prompt, columns.output), DEFAULT_TOKENS, strict=True):
        counts.append(_parse_counts(cells[name], reasons) if name else reasons.map(lambda _, n=default: n))
    if columns.model:
        reasons[cells[columns.model].eq("") & reasons.eq("")] = f"field {columns.model} is empty"
    rest = {"model": cells.get(columns.model or "model"), "hash_ids": cells.get("hash_ids")}
    found = DataFrame({"arrival": arrival, "prompt": counts[0], "output": counts[1], **rest})[reasons.eq("")]
    return found.astype({"arrival": float, "prompt": int, "output": int}), reasons


def _parse_times(cells: Series, unit: float, reasons: Series) -> Series:
    """Return times in seconds: numbers times `unit`, or dates since 1970. Reject rows with other values."""
    from pandas import Timestamp, to_datetime, to_numeric

    # As text, because a very large integer would raise an error.
    seconds = to_numeric(cells.astype(str), errors="coerce") * unit
    if seconds.isna().any():
        dates = to_datetime(cells[seconds.isna()].astype(str), errors="coerce", utc=True, format="ISO8601")
        seconds = seconds.fillna((dates - Timestamp(0, tz="UTC")).dt.total_seconds())
    is_bad = ~seconds.abs().lt(float("inf"))
    return _reject_rows(is_bad, "time {!r} is neither a number nor a date", cells, reasons, seconds)


def _parse_counts(cells: Series, reasons: Series) -> Series:
    from pandas import to_numeric

    counts = to_numeric(cells.astype(str), errors="coerce")
    is_bad = ~(counts.ge(1) & counts.lt(2**53) & counts.mod(1).eq(0))
    text = f"field {cells.name}: {{!r}} is not a positive integer"
    return _reject_rows(is_bad, text, cells, reasons, counts)


def _reject_rows(is_bad: Series, text: str, cells: Series, reasons: Series, values: Series) -> Series:
    for line in is_bad.index[is_bad & reasons.eq("")]:
        reasons[line] = text.format(cells[line]) if cells[line] != "" else f"field {cells.name} is empty"
    return values
