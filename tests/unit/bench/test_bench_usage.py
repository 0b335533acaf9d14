"""CPU seconds of a process tree include reaped children and daemons and exclude older processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from coldstart.bench import usage
from coldstart.system.proc import processes
from coldstart.validate import process_tree

BURN = "import time\nwhile time.process_time() < {}: pass\n"
DAEMON = """
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
{code}
open({mark!r}, "w").close()
time.sleep(60)
"""


def start(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_child_that_we_reaped_is_counted_and_our_own_time_is_not() -> None:
    before = process_tree.snapshot()
    start(BURN.format(0.2)).communicate()
    began = time.process_time()
    while time.process_time() < began + 0.3:
        pass
    spent = usage.cpu_between(before, process_tree.snapshot())
    assert 0.18 <= spent < 0.45


def test_a_daemon_stays_in_the_tree(tmp_path: Path) -> None:
    with process_tree.adopting_orphans():
        before = process_tree.snapshot()
        mark = tmp_path / "mark"
        code = DAEMON.format(code=BURN.format(0.2), mark=str(mark))
        subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
        while not mark.exists():
            time.sleep(0.01)
        after = process_tree.snapshot()
        daemons = process_tree.new_processes(before, after, [os.getpid()])
        assert usage.cpu_between(before, after) >= 0.18
        assert processes.pss_bytes([process.pid for process in daemons]) > 100_000
        assert processes.rss_bytes(daemons[0].pid) >= processes.pss_bytes([daemons[0].pid])
        for process in daemons:
            process_tree.send_signal(process.pid, signal.SIGKILL)
        while process_tree.new_processes(before, process_tree.snapshot(), [os.getpid()]):
            process_tree.reap_orphans(before)
            time.sleep(0.01)


def test_exited_process_has_no_memory() -> None:
    process = start("pass")
    process.communicate()
    assert processes.pss_bytes([process.pid]) == processes.rss_bytes(process.pid) == 0


def test_a_served_process_outside_our_tree_counts_with_its_parents_share() -> None:
    def make(pid: int, parent: int, own: float) -> process_tree.ProcessSample:
        return process_tree.ProcessSample(pid, parent, started=pid, own_s=own, reaped_s=0.0)

    me = make(os.getpid(), 1, 5.0)
    template, other = 900_001, 900_009
    before = {me.pid: me, template: make(template, 1, 7.0), other: make(other, 1, 1.0)}
    served = {900_002: make(900_002, template, 0.5), 900_003: make(900_003, 900_002, 0.25)}
    after = {me.pid: me, template: make(template, 1, 7.125), other: make(other, 1, 4.0), **served}
    assert usage.cpu_between(before, after, served=900_002) == 0.875
    assert usage.cpu_between(before, after) == 0.0
    assert usage.cpu_between(before, after, served=other) == 0.0  # a pid of another namespace: not this start
