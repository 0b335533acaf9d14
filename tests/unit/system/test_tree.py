"""A tree of processes: which are seen, whether one is stopped, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
from support.waiting import has_ended, wait_until

from coldstart.system.proc import processes
from coldstart.system.proc.tree import ProcessTree


def _started(script: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def test_kill_ends_a_descendant_when_its_parent_has_died() -> None:
    parent = _started("sleep 60 & echo up; wait")
    tree = ProcessTree(parent.pid)
    (child,) = processes.list_children(parent.pid)
    os.kill(child, signal.SIGSTOP)
    wait_until(tree.is_stopped)
    parent.kill()
    parent.wait()
    assert tree.is_stopped()
    tree.kill()
    wait_until(lambda: processes.read_identity(child) is None)


PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(60)
"""
GROUP = """
import os, signal, subprocess, sys, time
from coldstart.system.proc.lifeline import die_as_a_group
die_as_a_group()
reader, writer = os.pipe()
forked = os.fork()
if not forked:
    os.write(writer, b".")
    while True:
        time.sleep(0.1)  # a signal just before pause() would wait for the next one
else:
    os.read(reader, 1)  # Python drops the signals of a forked process until it runs
    asked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(os.getpid(), forked, asked.pid, flush=True)
    time.sleep(60)
"""


def test_children_end_with_the_process() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, GROUP], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    family = [*map(int, parent.stdout.readline().split())]
    parent.kill()
    parent.communicate(timeout=30)
    assert len(family) == 3
    wait_until(lambda: all(map(has_ended, family)))


def test_forked_child_ends_alone() -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", GROUP], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert first.stdout is not None
    _, forked, asked = map(int, first.stdout.readline().split())
    psutil.Process(forked).send_signal(signal.SIGTERM)
    wait_until(lambda: has_ended(forked))
    assert first.poll() is None and not has_ended(asked)
    first.terminate()
    first.communicate(timeout=30)
    assert first.returncode == -signal.SIGKILL
    wait_until(lambda: has_ended(asked))
