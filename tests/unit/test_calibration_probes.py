"""The calibration probes on a simulated server return its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from benchmarks.scheduling import probes
from coldstart.lab.replay import RequestRecord, build_records
from coldstart.lab.scheduling import SimSettings, simulate
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import IterationProfile, SchedulerSettings

BATCH = 4
TRUTH = SimSettings(request_s=0.003, context_s=1e-6, crowd_s=2e-4)
TIMES = IterationProfile.create(
    [(1, 0.005), (16, 0.008), (512, 0.12)], [(1, 0.005), (2, 0.0051), (4, 0.0053)]
)


@pytest.mark.parametrize("name", ["fcfs", "skip-join-mlfq"])
def test_the_parameters_come_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SchedulerSettings(name, batch=BATCH)

    def send(server: object, rows: Sequence[TraceRequest], seed: int) -> list[RequestRecord]:
        return build_records(simulate(rows, TIMES, settings, TRUTH))

    monkeypatch.setattr(probes, "send", send)
    server: Any = None
    found = probes.probe(server, BATCH, count())
    machine, profile = found.settings(settings), found.profile()
    assert machine.request_s == pytest.approx(TRUTH.request_s, rel=0.01)
    assert machine.context_s == pytest.approx(TRUTH.context_s, rel=0.01)
    assert machine.crowd_s == pytest.approx(TRUTH.crowd_s, rel=0.1)
    assert [profile.decode(b) for b in (1, 2, 4)] == pytest.approx([0.005, 0.0051, 0.0053], rel=0.01)
    assert [profile.prefill(n) for n in (1, 16, 512)] == pytest.approx([0.005, 0.008, 0.12], rel=0.01)
