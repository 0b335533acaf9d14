"""Read the request traces stored in this directory (README.md: content, source, licence)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pandas import read_csv

from coldstart.lab.traces import TraceRequest

HERE = Path(__file__).parent
UNITS_PER_S = 10**7


def azure_conversation() -> list[TraceRequest]:
    """Return the Azure LLM conversation trace of 2023."""
    return [TraceRequest(at, prompt, output) for at, (prompt, output) in _rows("azure_conversation_2023")]


def mooncake_conversation() -> list[TraceRequest]:
    """Return the Mooncake conversation trace; the one hash id of a request is its conversation."""
    rows = _rows("mooncake_conversation_2025")
    return [TraceRequest(at, prompt, output, hash_ids=(of,)) for at, (prompt, output, of) in rows]


def azure_functions() -> list[tuple[float, int]]:
    """Return (start time in seconds, function) of each invocation of the Azure Functions sample of 2021."""
    return [(at, function) for at, (function,) in _rows("azure_functions_2021")]


def _rows(name: str) -> Iterator[tuple[float, list[int]]]:
    """Yield the time in seconds and the other columns of each row."""
    rows = read_csv(HERE / f"{name}.csv.xz")
    times = rows.pop("gap").cumsum() / UNITS_PER_S
    return zip(times.tolist(), rows.to_numpy().tolist(), strict=True)
