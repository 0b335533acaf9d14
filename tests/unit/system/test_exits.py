"""Exit codes in words, and the kernel's count of processes killed because of missing memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldstart.system.proc import exits


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.events", "low 0\noom 9\noom_kill 4\n"),
        ("4:cpu,memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 4\n"),
        ("0::/", "proc/vmstat", "nr_free_pages 7\noom_kill 4\n"),
    ],
)
def test_memory_kills_are_counted_by_the_control_group_or_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, file: str, text: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(exits, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert exits.count_memory_kills() == 4
