"""The calibration's probes, put to a simulated server, give back what it was made of."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from coldstart.measure.replay import RequestRecord, records_of
from coldstart.scheduling import IterationProfile, SchedulerSettings
from coldstart.scheduling.simulate import SimSettings, simulate
from coldstart.traces import TraceRequest

BATCH = 4
TRUTH = SimSettings(request_s=0.003, context_s=1e-6, crowd_s=2e-4)
TIMES = IterationProfile.from_points(
    [(1, 0.005), (16, 0.008), (512, 0.12)], [(1, 0.005), (2, 0.0051), (4, 0.0053)]
)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, as a script in its folder finds it."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    import probes

    yield probes


@pytest.mark.parametrize("name", ["fcfs", "skip-join-mlfq"])
def test_the_parameters_come_back(probes: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SchedulerSettings(name, batch=BATCH)

    def send(servers: list[object], rows: Sequence[TraceRequest], seed: int) -> list[list[RequestRecord]]:
        return [records_of(simulate(rows, TIMES, settings, TRUTH)) for _ in servers]

    monkeypatch.setattr(probes, "send", send)
    found = probes.probe(None, BATCH, count())
    machine, profile = found.settings(settings), found.profile()
    assert machine.request_s == pytest.approx(TRUTH.request_s, rel=0.01)
    assert machine.context_s == pytest.approx(TRUTH.context_s, rel=0.01)
    assert machine.crowd_s == pytest.approx(TRUTH.crowd_s, rel=0.1)
    assert [profile.decode(b) for b in (1, 2, 4)] == pytest.approx([0.005, 0.0051, 0.0053], rel=0.01)
    assert [profile.prefill(n) for n in (1, 16, 512)] == pytest.approx([0.005, 0.008, 0.12], rel=0.01)
