"""An exited process counts no memory."""

import subprocess

from coldstart.system.proc import processes


def test_exited_process_has_no_memory() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert processes.measure_pss_bytes([process.pid]) == 0
