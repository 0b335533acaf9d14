"""Each step of a stage is reported when its process ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from coldstart.materialize import progress

CHILD = """
import sys, time
from coldstart.system.timeline import Span, append
for name, track in (("import", "server"), ("start", "offline"), ("profile", "offline")):
    append(sys.argv[1], Span(name, 1.0, 3.5, track))
    time.sleep(0.7)
sys.exit(3)
"""


def test_each_finished_step_is_reported_once_with_its_seconds(tmp_path: Path) -> None:
    said: list[str] = []
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "events")])
    assert progress.wait(process, tmp_path / "events", "offline", said.append) == 3
    assert said == ["start: 2.5 s", "profile: 2.5 s"]


def test_process_without_events_reports_no_step(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert progress.wait(process, tmp_path / "events", "offline", progress.silent) == 0
