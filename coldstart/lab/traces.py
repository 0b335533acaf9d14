"""Read request traces with pandas: a table of raw cells, checked column by column, becomes requests in order of arrival."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldstart.errors import UsageError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

HASH_TOKENS = 512
"""Number of tokens for each hash id of a Mooncake trace."""
LOWEST_TOKEN = 10
"""Lowest token id in prompts; tokenizers have their special tokens below."""


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


@dataclass(frozen=True, slots=True)
class BadRow:
    line: int
    reason: str


class TraceError(UsageError):
    """The trace cannot be used: an unknown format, a missing column, or a malformed row that is not skipped."""


@dataclass(slots=True)
class TraceReport:
    """Counters of a trace: usable rows, skipped rows, and the first skipped rows with their reasons."""

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
FORMATS = {
    "mooncake": MOONCAKE,
    "azure-llm": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "azure-functions": Columns("end_timestamp", None, None, "func", 1.0, "duration"),
    "burstgpt": Columns("Timestamp", "Request tokens", "Response tokens", "Model"),
    "sharegpt": TEXTS,
    "alpaca": TEXTS,
    "csv": None,
}


def read_trace(
    path: Path,
    trace_format: str,
    *,
    columns: Columns | None = None,
    strict: bool = False,
    report: TraceReport | None = None,
) -> list[TraceRequest]:
    """Return the requests of a file in order of arrival, with times from the first arrival on.

    Raises:
        TraceError: The file cannot be read, a column is missing, or a row is malformed and `strict` is true.
            Otherwise malformed rows are skipped and noted in `report`.
    """
    named = columns or FORMATS[trace_format]
    if named is None:
        raise TraceError(
            "a plain CSV needs a column mapping", hint="--columns time=...,prompt=...,output=..."
        )
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as problem:
        raise TraceError(
            f"cannot read the trace {path}: {problem.strerror}", hint="specify a trace file that can be read"
        ) from problem
    if named is TEXTS:
        cells, reasons = _read_texts(path, text, trace_format)
    else:
        cells, reasons = _read_lines(text) if named is MOONCAKE else _read_csv(text, named)
    return _requests(path, cells, reasons, named, strict, report or TraceReport())


def _read_csv(text: str, columns: Columns) -> tuple[DataFrame, Series]:
    """Return the named cells as text by line number, and an empty reason for each line."""
    from pandas import DataFrame, Series

    reader = csv.reader(StringIO(text, newline=""))
    header = [name.strip() for name in next(reader, [])]
    if missing := [name for name in columns.required if name not in header]:
        raise TraceError(
            f"the trace has no column {', '.join(missing)}; it has {', '.join(filter(None, header)) or 'no header'}",
            hint="use another --trace-format, or specify the columns with --columns",
        )
    places = [header.index(name) for name in columns.required]
    rows = {
        line: [row[place].strip() if place < len(row) else "" for place in places]
        for line, row in ((reader.line_num, row) for row in reader)
        if any(cell.strip() for cell in row)
    }
    cells = DataFrame.from_dict(rows, orient="index", columns=columns.required, dtype=object)
    return cells, Series("", cells.index)


def _read_lines(text: str) -> tuple[DataFrame, Series]:
    """Return one row for each line with a JSON object, and the reason against each other line."""
    lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
    return _collect(lines, _parse_object, [*MOONCAKE.required, "model", "hash_ids"])


def _read_texts(path: Path, text: str, trace_format: str) -> tuple[DataFrame, Series]:
    """Return the token counts of each member of a JSON array by its number, and the reason against each other member."""
    try:
        members = json.loads(text)
        if not isinstance(members, list):
            raise ValueError("expected a JSON array")
    except ValueError as problem:
        raise TraceError(
            f"cannot read {path}: {problem}", hint=f"name {trace_format}'s JSON file"
        ) from problem
    pick = _first_turns if trace_format == "sharegpt" else _instruction

    def measure(member: Any) -> dict[str, Any]:
        try:
            prompt, output = pick(member)
            return {
                "time": 0,
                "prompt": -(-len(prompt) // CHARACTERS),
                "output": -(-len(output) // CHARACTERS),
            }
        except (KeyError, TypeError, IndexError, ValueError):
            raise ValueError("has no prompt with its answer") from None

    return _collect(enumerate(members, start=1), measure, TEXTS.required)


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


def _first_turns(member: dict[str, Any]) -> tuple[str, str]:
    """Return the first two turns of a conversation of ShareGPT, as vLLM's own benchmark uses them."""
    human, answer = member["conversations"][:2]
    return human["value"], answer["value"]


def _instruction(member: dict[str, Any]) -> tuple[str, str]:
    """Return instruction with input, and output, of a row of Alpaca."""
    return "\n".join(filter(None, (member["instruction"], member.get("input")))), member["output"]


def _parse_object(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    if missing := sorted(set(MOONCAKE.required) - row.keys()):
        raise ValueError(f"lacks {', '.join(missing)}")
    hashes = row.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(isinstance(one, int) for one in hashes):
        raise ValueError("hash_ids is not a list of integers")
    return row


def _requests(
    path: Path, cells: DataFrame, reasons: Series, columns: Columns, strict: bool, report: TraceReport
) -> list[TraceRequest]:
    """Check the cells; return the requests of the rows without a reason against them."""
    arrival = _check_times(cells[columns.time], columns.time_unit, reasons)
    if columns.duration:
        arrival = arrival - _check_times(cells[columns.duration], 1.0, reasons)
    counts = []
    for name, usual in zip((columns.prompt, columns.output), DEFAULT_TOKENS, strict=True):
        counts.append(_check_counts(cells[name], reasons) if name else reasons.map(lambda _, n=usual: n))
    if columns.model:
        reasons[cells[columns.model].eq("") & reasons.eq("")] = f"has no value for {columns.model}"
    for line, reason in reasons[reasons.ne("")].items():
        if strict:
            hint = "fix the row, or allow --on-bad-row skip"
            raise TraceError(f"{path.name}, line {line}: {reason}", hint=hint)
        report.skipped += 1
        if report.skipped <= 100:
            report.bad_rows.append(BadRow(int(line), reason))
    good = arrival[reasons.eq("")].sort_values(kind="stable")
    report.rows += len(good)
    names = cells.get(columns.model or "model")
    hashes = cells.get("hash_ids")
    return [
        TraceRequest(
            float(time - good.iloc[0]),
            int(counts[0][line]),
            int(counts[1][line]),
            None if names is None or not isinstance(names[line], str) else names[line],
            tuple(hashes[line]) if hashes is not None and isinstance(hashes[line], list) else (),
        )
        for line, time in good.items()
    ]


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


def prompt_tokens(row: TraceRequest, number: int, seed: int, vocabulary: int) -> list[int]:
    """Return the row's number of token ids below `vocabulary`; a row without hash ids shares no prefix."""
    blocks = chain(
        row.hash_ids, (-1 - number * 7919 - i for i in range(row.prompt_tokens // HASH_TOKENS + 1))
    )
    return list(
        islice(chain.from_iterable(_block(block, seed, vocabulary) for block in blocks), row.prompt_tokens)
    )


def _block(block: int, seed: int, vocabulary: int) -> Iterator[int]:
    start, step = (block * 2654435761 + seed * 40503) & 0xFFFFFFFF, (block * 97 + 31) | 1
    span = vocabulary - LOWEST_TOKEN
    return (LOWEST_TOKEN + (start + i * step) % span for i in range(HASH_TOKENS))
