"""Read request traces with pandas: a table of raw cells, checked column by column, becomes requests in order of arrival."""

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
    """One request; `arrival_s` counts from the start of the trace, in seconds.

    `hash_ids` identify the prompt's prefix blocks (Mooncake: 512 tokens each); equal ids mean equal tokens.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    model: str | None = None
    hash_ids: tuple[int, ...] = ()

    def record(self, number: int, target: str) -> RequestRecord:
        """Return the record of this request, as it is before the request is sent."""
        return RequestRecord(
            number, self.arrival_s, self.prompt_tokens, self.output_tokens, self.model, target
        )


@dataclass(frozen=True, slots=True)
class BadRow:
    line: int
    reason: str


class TraceError(UsageError):
    """The trace cannot be used: no known format, a missing column, or a malformed row that is not skipped."""


@dataclass(slots=True)
class TraceReport:
    """Format of a trace, its requests, skipped rows, and the first skipped rows with their reasons."""

    trace_format: str = ""
    rows: int = 0
    skipped: int = 0
    bad_rows: list[BadRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a trace by meaning; those without a name have the value of DEFAULT_TOKENS.

    `time_unit` is the number of seconds per unit of a numeric time. `duration` names the seconds between the arrival
    of a row and its time.
    """

    time: str
    prompt: str | None = None
    output: str | None = None
    model: str | None = None
    time_unit: float = 1.0
    duration: str | None = None

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

    @property
    def required(self) -> list[str]:
        """Return the columns that a trace must have."""
        return [name for name in (self.time, self.prompt, self.output, self.model, self.duration) if name]


DEFAULT_TOKENS = (512, 128)
"""Prompt and output tokens for rows of traces without lengths."""
MOONCAKE = Columns("timestamp", "input_length", "output_length", None, 1e-3)
TEXTS = Columns("time", "prompt", "output")
"""Data sets of texts without times, in one JSON array: all rows arrive at once."""
CHARACTERS = 4
"""Characters of English text for each token, rounded up: data sets of texts have no token counts."""
CSV_FORMATS = {
    "Azure LLM": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "Azure Functions 2021": Columns("end_timestamp", None, None, "func", 1.0, "duration"),
    "BurstGPT": Columns("Timestamp", "Request tokens", "Response tokens", "Model"),
}
FUNCTION, MINUTE_S = "HashFunction", 60
"""Azure Functions 2019: a row for each function, and columns 1 to 1440 with its invocations in each minute of a day."""
MOST_INVOCATIONS = 2_000_000
"""Limit of the requests of Azure Functions 2019, of which one day has hundreds of millions."""


def read_trace(
    path: Path,
    *,
    columns: Columns | None = None,
    strict: bool = False,
    report: TraceReport | None = None,
    until_s: float = inf,
    limit: int | None = None,
) -> list[TraceRequest]:
    """Return the requests of a file in order of arrival, with times from the first arrival on; its content shows its format.

    `columns` are those of another CSV file. Invocation counts become requests only up to `until_s` and about `limit`.

    Raises:
        TraceError: The file cannot be read or has no known format, a column is missing, or a row is malformed and
            `strict` is true. Otherwise malformed rows are skipped and noted in `report`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as problem:
        raise TraceError(
            f"cannot read the trace {path}: {problem.strerror}", hint="specify a trace file that can be read"
        ) from problem
    report = report or TraceReport()
    is_json = text.lstrip()[:1] in ("", "[", "{")
    header = [] if is_json else [name.strip() for name in next(csv.reader(text[:65536].splitlines()))]
    known = (name for name, one in CSV_FORMATS.items() if set(one.required) <= set(header))
    if columns is not None or (name := next(known, None)):
        report.trace_format = "CSV" if columns else str(name)
        named = columns or CSV_FORMATS[report.trace_format]
        requests, reasons = _check(*_read_csv(text, header, named), named)
    elif {FUNCTION, "1"} <= set(header):
        report.trace_format = "Azure Functions 2019"
        requests, reasons = _expand(path, text, until_s, limit)
    elif text.lstrip().startswith("["):
        report.trace_format, members, reasons = _read_texts(path, text)
        requests, reasons = _check(members, reasons, TEXTS)
    elif not text.strip() or any(line.startswith("{") for line in text.split("\n")):
        report.trace_format = "Mooncake"
        requests, reasons = _check(*_read_lines(text), MOONCAKE)
    else:
        raise TraceError(
            f"{path} has no known format; its columns are {', '.join(header)}",
            hint="specify the columns: --columns time=COLUMN,prompt=COLUMN,output=COLUMN",
        )
    for line, reason in reasons[reasons.ne("")].items():
        if strict:
            hint = "fix the row, or allow --on-bad-row skip"
            raise TraceError(f"{path.name}, line {line}: {reason}", hint=hint)
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
    """Return the named cells as text by line number, and an empty reason for each line."""
    from pandas import Series

    if missing := [name for name in columns.required if name not in header]:
        raise TraceError(
            f"the trace has no column {', '.join(missing)}; it has {', '.join(filter(None, header)) or 'no header'}",
            hint="specify the columns that it has with --columns",
        )
    places = [header.index(name) for name in columns.required]
    cells = _parse(
        text,
        header=None,
        skiprows=1,
        names=range(len(header)),
        usecols=places,
        dtype=str,
        keep_default_na=False,
        skip_blank_lines=False,
    )
    cells = cells[places].fillna("").apply(lambda column: column.str.strip())
    cells.columns, cells.index = columns.required, cells.index + 2
    cells = cells[cells.ne("").any(axis=1)].astype(object)
    return cells, Series("", cells.index)


def _parse(text: str, **options: Any) -> DataFrame:
    from pandas import read_csv

    try:
        return read_csv(StringIO(text), **options)
    except ValueError as problem:
        raise TraceError(
            f"cannot read the trace: {problem}", hint="check the quotes of the CSV file"
        ) from problem


def _expand(path: Path, text: str, until_s: float, limit: int | None) -> tuple[DataFrame, Series]:
    """Return a request for each invocation of Azure Functions 2019, and the reason against each row without counts.

    Arrivals are uniformly random within their minute, and the same for the same file.
    """
    import numpy as np
    from pandas import DataFrame, Series, to_numeric

    table = _parse(text, low_memory=False, usecols=lambda name: name == FUNCTION or name.isdigit())
    names = table.pop(FUNCTION)
    counts = table.apply(to_numeric, errors="coerce").to_numpy("float32")
    good = ((counts >= 0) & (counts < 2**24) & (np.floor(counts) == counts)).all(axis=1)
    reasons = Series("", names.index + 2)
    reasons[~good] = "an invocation count is not a whole number"
    counts, names = counts[good].astype("int32"), names[good].astype(str).to_numpy()
    of_minute = counts.sum(axis=0)
    first = int((of_minute > 0).argmax())
    end = first + ceil(min(until_s / MINUTE_S, len(of_minute))) + 1
    if limit is not None:
        end = min(end, int(of_minute.cumsum().searchsorted(limit)) + 1)
    counts = counts[:, first:end]
    if (total := int(counts.sum())) > MOST_INVOCATIONS:
        raise TraceError(
            f"{path} has {total:,} invocations, more than {MOST_INVOCATIONS:,}",
            hint="replay a part of it: --duration SECONDS or --limit N",
        )
    function, minute = counts.nonzero()
    times = counts[function, minute]
    starts = minute.repeat(times) + np.random.default_rng(0).random(total)
    prompt, output = DEFAULT_TOKENS
    requests = {"arrival": starts * MINUTE_S, "prompt": prompt, "output": output, "hash_ids": None}
    return DataFrame(requests | {"model": names[function.repeat(times)]}), reasons


def _read_lines(text: str) -> tuple[DataFrame, Series]:
    """Return one row for each line with a JSON object, and the reason against each other line."""
    lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
    cells, reasons = _collect(lines, _parse_object, [*MOONCAKE.required, "model", "hash_ids"])
    return cells.astype(object).fillna(""), reasons


def _read_texts(path: Path, text: str) -> tuple[str, DataFrame, Series]:
    """Return the format, the token counts of each member of a JSON array by its number, and the reasons against the others."""
    try:
        members = json.loads(text)
    except ValueError as problem:
        raise TraceError(
            f"cannot read {path}: {problem}", hint="name the JSON file of ShareGPT or Alpaca"
        ) from problem

    def measure(member: Any) -> dict[str, Any]:
        try:
            if "instruction" in member:
                given = filter(None, (member["instruction"], member.get("input")))
                prompt, output = "\n".join(given), member["output"]
            else:  # the first two turns, as in vLLM's own benchmark
                prompt, output = (turn["value"] for turn in member["conversations"][:2])
            lengths = (ceil(len(one) / CHARACTERS) for one in (prompt, output))
            return dict(zip(TEXTS.required, (0, *lengths), strict=True))
        except (KeyError, TypeError, ValueError):
            raise ValueError("has no prompt with its answer") from None

    cells, reasons = _collect(enumerate(members, start=1), measure, TEXTS.required)
    is_alpaca = any("instruction" in one for one in members[:1] if isinstance(one, dict))
    return "Alpaca" if is_alpaca else "ShareGPT", cells, reasons


def _collect(
    items: Iterable[tuple[int, Any]], read: Callable[[Any], dict[str, Any]], columns: list[str]
) -> tuple[DataFrame, Series]:
    """Return the row that `read` makes of each numbered item, and the reason of each that raises ValueError."""
    from pandas import DataFrame, Series

    rows, reasons = dict[int, dict[str, Any]](), dict[int, str]()
    for number, item in items:
        try:
            rows[number], reasons[number] = read(item), ""
        except ValueError as problem:
            rows[number], reasons[number] = {}, str(problem)
    return DataFrame.from_dict(rows, orient="index").reindex(columns=columns), Series(reasons, dtype=str)


def _parse_object(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    hashes = row.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(isinstance(one, int) for one in hashes):
        raise ValueError("hash_ids is not a list of integers")
    return row


def _check(cells: DataFrame, reasons: Series, columns: Columns) -> tuple[DataFrame, Series]:
    """Return the requests of the rows without a reason against them, as columns, and the reasons with those of the cells."""
    from pandas import DataFrame

    arrival = _check_times(cells[columns.time], columns.time_unit, reasons)
    if columns.duration:
        arrival = arrival - _check_times(cells[columns.duration], 1.0, reasons)
    counts = []
    for name, usual in zip((columns.prompt, columns.output), DEFAULT_TOKENS, strict=True):
        counts.append(_check_counts(cells[name], reasons) if name else reasons.map(lambda _, n=usual: n))
    if columns.model:
        reasons[cells[columns.model].eq("") & reasons.eq("")] = f"has no value for {columns.model}"
    rest = {"model": cells.get(columns.model or "model"), "hash_ids": cells.get("hash_ids")}
    found = DataFrame({"arrival": arrival, "prompt": counts[0], "output": counts[1], **rest})[reasons.eq("")]
    return found.astype({"arrival": float, "prompt": int, "output": int}), reasons


def _check_times(cells: Series, unit: float, reasons: Series) -> Series:
    """Return seconds: numbers times `unit`, or dates as seconds since 1970. Others get a reason."""
    from pandas import Timestamp, to_datetime, to_numeric

    seconds = to_numeric(cells, errors="coerce") * unit
    if seconds.isna().any():
        dates = to_datetime(cells[seconds.isna()].astype(str), errors="coerce", utc=True, format="ISO8601")
        seconds = seconds.fillna((dates - Timestamp(0, tz="UTC")).dt.total_seconds())
    wrong = ~seconds.abs().lt(float("inf"))
    return _give_reason(wrong, "time {!r} is neither a number nor a date", cells, reasons, seconds)


def _check_counts(cells: Series, reasons: Series) -> Series:
    from pandas import to_numeric

    counts = to_numeric(cells, errors="coerce")
    wrong = ~(counts.ge(1) & counts.lt(2**53) & counts.mod(1).eq(0))
    text = f"field {cells.name}: {{!r}} is not a whole number above zero"
    return _give_reason(wrong, text, cells, reasons, counts)


def _give_reason(wrong: Series, text: str, cells: Series, reasons: Series, values: Series) -> Series:
    for line in wrong.index[wrong & reasons.eq("")]:
        reasons[line] = text.format(cells[line]) if cells[line] != "" else f"has no value for {cells.name}"
    return values
