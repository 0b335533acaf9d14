"""The counters that an operator sees in /metrics."""

from __future__ import annotations

import subprocess
import sys

from coldstart.vllm.scheduling.counters import Counters, Exporter


def test_exporter_is_disabled_when_no_multiprocess_directory_is_set() -> None:
    exporter = Exporter({})
    exporter.publish(Counters(), [1, 2])
    assert not exporter.enabled


def test_exporter_publishes_counters_and_queue_lengths_when_a_directory_is_set() -> None:
    """Checked in another process, because the metrics of a process cannot be created twice."""
    source = """
import prometheus_client, tempfile
from coldstart.vllm.scheduling.counters import Counters, Exporter
with tempfile.TemporaryDirectory() as directory:
    exporter = Exporter({"PROMETHEUS_MULTIPROC_DIR": directory})
    exporter.publish(Counters(parks=1), [4])
    exporter.publish(Counters(parks=3, loading_seconds=2.5), [2])
print(prometheus_client.generate_latest().decode())
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    for line in ("parks 3.0", "loading_seconds 2.5", 'queue_length{level="1"} 2.0'):
        assert f"\ncoldstart_scheduler_{line}\n" in done.stdout
