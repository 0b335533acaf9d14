"""A tree of processes: which are seen, whether one is stopped, and its end."""

from __future__ import annotations

import os
import signal
import subprocess

from support.waiting import wait_until

from coldstart.system.proc import processes
from coldstart.system.proc.tree import ProcessTree


def _started(script: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def test_kill_ends_a_descendant_when_its_parent_has_died() -> None:
    parent = _started("sleep 60 & echo up; wait")
    tree = ProcessTree(parent.pid)
    (child,) = processes.children(parent.pid)
    os.kill(child, signal.SIGSTOP)
    wait_until(tree.is_stopped)
    parent.kill()
    parent.wait()
    assert tree.is_stopped()
    tree.kill()
    wait_until(lambda: processes.birth(child) is None)


def test_processor_time_counts_descendants_only() -> None:
    parent = _started("(while :; do :; done) & echo up; wait")
    tree = ProcessTree(parent.pid)
    try:
        wait_until(lambda: tree.used_processor_s() > 0)
        (child,) = processes.children(parent.pid)
        os.kill(child, signal.SIGSTOP)
        wait_until(tree.is_stopped)
        tree.used_processor_s()
        assert tree.used_processor_s() == 0.0
    finally:
        tree.kill()
    assert parent.wait() == -signal.SIGKILL
