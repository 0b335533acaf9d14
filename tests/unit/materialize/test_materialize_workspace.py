"""Work directories: removed with their run, kept for a running one, swept after a killed one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from coldstart.materialize import materialize

HELD = """
import sys
from pathlib import Path
from coldstart.materialize import materialize
with materialize._workspace(Path(sys.argv[1])) as work:
    print(work, flush=True)
    sys.stdin.read()
"""


def test_one_of_a_running_process_stays_and_one_of_a_killed_process_goes(tmp_path: Path) -> None:
    root = tmp_path / "work"
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    held = Path(process.stdout.readline().strip())
    with materialize._workspace(root) as own:
        assert held.is_dir() and own.is_dir() and own != held
    assert not own.exists()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert held.is_dir()
    with materialize._workspace(root) as own:
        assert [own] == list(root.iterdir())
    assert list(root.iterdir()) == []
