"""What the process of a stage reports on its pipe is shown while it runs."""

from __future__ import annotations

import os
import subprocess
import sys

from coldstart.launch import server_process

CHILD = """
import sys
from coldstart.system.start_progress import StartProgress, write
for done in (1, 2):
    write(int(sys.argv[1]), StartProgress("profile", done, 2, "sizes"))
sys.exit(3)
"""


def _run(program: str) -> tuple[int, list[str]]:
    said: list[str] = []
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program, str(writer)], pass_fds=[writer])
    os.close(writer)
    code = server_process.await_exit(process, reader, lambda one: said.append(one.describe()))
    os.close(reader)
    return code, said


def test_wait_returns_the_exit_code_after_each_report() -> None:
    assert _run(CHILD) == (3, ["profile: 1 of 2 sizes", "profile: 2 of 2 sizes"])
