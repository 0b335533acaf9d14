"""One run: a trace sent to one server, what every request experienced, and what the scheduler counted.

Capacity (load 1) is measured, not calculated: requests that arrive all at once, tokens done until the last of
them was admitted, over that time; the drain that follows runs with half-empty batches and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.scheduling.live.model import VOCABULARY
from benchmarks.scheduling.live.servers import Server
from benchmarks.scheduling.live.workloads import lengths
from coldstart.lab.live import ReplaySettings, replay
from coldstart.lab.records import RequestRecord
from coldstart.lab.traces import TraceRequest

LONG_SHARE = 0.1
CAPACITY_REQUESTS, CAPACITY_PER_SLOT = 100, 4
TIMEOUT_S = 900.0


def run(server: Server, rows: Sequence[TraceRequest], seed: int) -> dict[str, Any]:
    """Return metrics, every request, and the increase of the server's totals."""
    before = server.totals()
    records = send(server, rows, seed)
    grown = {
        kind: {name: round(value - before[kind][name], 4) for name, value in totals.items()}
        for kind, totals in server.totals().items()
    }
    return {"metrics": metrics(records), **grown, "requests": [_short(record) for record in records]}


def send(server: Server, rows: Sequence[TraceRequest], seed: int) -> list[RequestRecord]:
    """Send the requests. Raises SystemExit when one fails."""
    settings = ReplaySettings(seed, VOCABULARY, TIMEOUT_S)
    # Without an interrupt handler of the replay, an interrupt ends the main thread and the servers.
    done = replay(rows, [server.target], settings, interrupts=lambda stop: None)
    if failed := [record for record in done.records if not record.ok]:
        raise SystemExit(f"{len(failed)} of {len(rows)} requests failed: {asdict(failed[0])}")
    server.warm = True
    return done.records


def metrics(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Seconds, and output tokens per second, while requests arrive and over the whole run."""
    longest = sorted(records, key=lambda r: -r.wanted_tokens)[: max(1, round(LONG_SHARE * len(records)))]
    span = max(_end(r) for r in records) - min(r.due_s for r in records)
    found = {
        "per_token_s": [_known(r.normalized_s) for r in records],
        "ttft_s": [_known(r.ttft_s) for r in records],
        "latency_s": [_known(r.latency_s) for r in records],
        "client_lag_s": [_known(r.wait_s) for r in records],
    }
    marks = {f"{name}.mean": fmean(values) for name, values in found.items()}
    marks |= {f"{name}.p95": float(np.percentile(values, 95)) for name, values in found.items()}
    marks["longest_s.mean"] = fmean(_known(r.latency_s) for r in longest)
    marks["tokens_per_s"] = _sustained(records)
    marks["makespan_tokens_per_s"] = sum(r.output_tokens for r in records) / span
    return marks


def _sustained(records: Sequence[RequestRecord]) -> float:
    """Output tokens per second while requests arrive.

    After the last arrival the queue drains with fewer requests than slots, which does not happen in a service. The tokens of
    an answer count as evenly spread from first to last, which underestimates a scheduler that returns the first ones early.
    """
    began, until = min(r.due_s for r in records), max(r.due_s for r in records)
    done = (_done_by(r, until) for r in records if _known(r.first_token_s) < until)
    return sum(done) / (until - began)


def capacity(server: Server, workload: str, batch: int, seed: int = 1) -> dict[str, float]:
    """Return the requests and tokens per second that the server sustains with its batch full."""
    rows = capacity_requests(workload, batch, seed)
    records = send(server, rows, seed)
    admitted = max(_known(r.first_token_s) for r in records)
    tokens = sum(_done_by(r, admitted) for r in records)
    mean = fmean(r.output_tokens for r in records)
    return {
        "requests_per_s": tokens / mean / admitted,
        "tokens_per_s": tokens / admitted,
        "seconds": admitted,
    }


def capacity_requests(workload: str, batch: int, seed: int = 1) -> list[TraceRequest]:
    """Return simultaneous requests that measure the capacity."""
    count = max(CAPACITY_REQUESTS, CAPACITY_PER_SLOT * batch)
    return [TraceRequest(0.0, r.prompt_tokens, r.output_tokens) for r in lengths(workload, count, seed)]


def _done_by(record: RequestRecord, at_s: float) -> float:
    first, last = _known(record.first_token_s), _end(record)
    if at_s >= last:
        return record.output_tokens
    return 1 + (record.output_tokens - 1) * (at_s - first) / (last - first)


def _short(record: RequestRecord) -> list[object]:
    """[output tokens, seconds to the first token, seconds to the last, digest of the tokens]."""
    first, last = _known(record.ttft_s), _known(record.latency_s)
    return [record.output_tokens, round(first, 5), round(last, 5), (record.answer or "")[:16]]


def _end(record: RequestRecord) -> float:
    return _known(record.finished_s)


def _known(value: float | None) -> float:
    return math.nan if value is None else value
