"""Available memory respects the limits of the control group and of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldstart.system.proc import processes


@pytest.mark.parametrize(("limit", "left"), [("1000", 400), ("max", 4096 * 1024), ("100", 0)])
def test_the_smaller_of_machine_and_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, left: int
) -> None:
    group = tmp_path / "sys/fs/cgroup/one/two"
    group.mkdir(parents=True)
    (group.parent / "memory.max").write_text(limit)
    (group.parent / "memory.current").write_text("600")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4096 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/one/two\n")
    monkeypatch.setattr(processes, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert processes.available_memory() == left
