"""Work directories: removed at the end of a run, retained while it runs, and removed by the next run after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from coldstart.materialize.materialize import workspace

WRITER = """
import sys, time
from pathlib import Path
caches, over = Path(sys.argv[1]) / "caches", time.monotonic() + 1.5
print("up", flush=True)
while time.monotonic() < over:
    try:
        (caches / str(time.monotonic_ns())).touch()
    except FileNotFoundError:
        break
"""


def test_workspace_is_removed_while_a_child_still_writes(tmp_path: Path) -> None:
    root = tmp_path / "work"
    with workspace(root) as own:
        (own / "caches").mkdir()
        for number in range(5000):  # so that something is written while these are removed
            (own / "caches" / str(number)).touch()
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(own)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
    assert not own.exists()
    writer.communicate()
    with workspace(root):
        pass
    assert list(root.iterdir()) == []
