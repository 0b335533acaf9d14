"""The counters that an operator sees in /metrics."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from coldstart.vllm.scheduling import counters as counted
from coldstart.vllm.scheduling.counters import Counters, Exporter, list_exported


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

    names = {name for field in fields(Counters) for name in list_exported(field.name)}
    monkeypatch.setattr(counted, "_make_gauges", lambda: {name: Gauge(name) for name in names})
    exporter = Exporter({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})
    exporter.publish(Counters())
    assert {name for name, _ in written} == names
    written.clear()
    exporter.publish(Counters(parks=3))
    exporter.publish(Counters(parks=3))
    exporter.publish(Counters())
    assert written == [("parks", 3), ("parks", 0)]


def test_counter_of_seconds_has_its_older_name_and_the_one_with_its_unit() -> None:
    """Checked in another process, because the metrics of a process cannot be created twice."""
    source = """
import prometheus_client, tempfile
from coldstart.vllm.scheduling.counters import Counters, Exporter
with tempfile.TemporaryDirectory() as directory:
    Exporter({"PROMETHEUS_MULTIPROC_DIR": directory}).publish(Counters(loading_s=2.5))
print(prometheus_client.generate_latest().decode())
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert "\ncoldstart_scheduler_loading_s 2.5\n" in done.stdout
    assert "\ncoldstart_scheduler_loading_seconds 2.5\n" in done.stdout
