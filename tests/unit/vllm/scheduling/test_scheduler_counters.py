"""The counters that an operator sees in /metrics."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from coldstart.vllm.scheduling import counters as counted
from coldstart.vllm.scheduling.counters import Counters, Exporter


def test_exporter_is_disabled_when_no_multiprocess_directory_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "_make_gauges", dict)
    assert not Exporter({}).enabled
    assert Exporter({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}).enabled


def test_exporter_writes_a_counter_only_when_its_value_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float]] = []

    class Gauge:
        def __init__(self, name: str) -> None:
            self.name = name

        def set(self, value: float) -> None:
            written.append((self.name, value))

    monkeypatch.setattr(
        counted, "_make_gauges", lambda: {field.name: Gauge(field.name) for field in fields(Counters)}
    )
    exporter = Exporter({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})
    exporter.publish(Counters())
    assert {name for name, _ in written} == {field.name for field in fields(Counters)}
    written.clear()
    exporter.publish(Counters(parks=3))
    exporter.publish(Counters(parks=3))
    exporter.publish(Counters())
    assert written == [("parks", 3), ("parks", 0)]
