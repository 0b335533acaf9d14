"""Memory does not grow with the trace: only current requests are in memory."""

import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from coldstart.lab.replay import RecordStore, ReplaySettings, Slo, open_loop, replay, summarize
from coldstart.lab.replay.client import Target
from coldstart.lab.replay.http import Endpoint
from coldstart.lab.replay.record import RequestRecord
from coldstart.lab.replay.simulated import build_record
from coldstart.lab.scheduling import simulate
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import IterationProfile, SchedulerSettings

PROFILE = IterationProfile.create([(1, 0.001)], [(1, 0.001)])
SLACK = 256 << 10
"""Bytes by which the longer trace may raise the peak; one pointer per request would exceed it."""


def rows(count: int, gap_s: float) -> Iterator[TraceRequest]:
    return (TraceRequest(i * gap_s, 8, 2) for i in range(count))


def simulated(count: int) -> RecordStore:
    records = RecordStore()
    simulate(
        rows(count, 0.0005),
        PROFILE,
        SchedulerSettings(batch=16),
        finished=lambda job: records.add(build_record(job)),
    )
    return records


def live(count: int) -> RecordStore:
    records = RecordStore()
    target = Target(Endpoint.parse("http://127.0.0.1:1", "/v1/completions"), "m", "t")
    done = replay(rows(count, 0.0), [target], ReplaySettings(), lambda stop: None, records.add)
    assert done.records == [] and done.ended == "complete"
    return records


async def answer_immediately(target: object, prompt: object, record: RequestRecord, *_: object) -> bool:
    """Answer like a server without latency."""
    record.sent_s = record.first_token_s = record.due_s
    record.finished_s, record.output_tokens = record.due_s + 0.001, 2
    return True


@pytest.mark.parametrize(("run", "few", "many"), [(simulated, 2_000, 40_000), (live, 500, 5_000)])
@pytest.mark.slow
def test_the_peak_is_that_of_a_shorter_trace(
    run: Callable[[int], RecordStore], few: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_loop, "send", answer_immediately)
    peaks = [peak(run, count) for count in (few, many)]
    assert peaks[1] < peaks[0] + SLACK, peaks


def peak(run: Callable[[int], RecordStore], count: int) -> int:
    """Return the peak bytes of a replay with its summary."""
    tracemalloc.start()
    try:
        records = run(count)
        found = summarize(records, Slo(ttft_s=1.0), 1.0)
        assert found["requests"] == found["completed"] == count == len(records)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
