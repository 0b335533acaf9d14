"""CPU seconds of a process tree include reaped children and daemons and exclude older processes."""

import os
import subprocess

from coldstart.bench.measure import cpu_between
from coldstart.system.proc import processes
from coldstart.validate import process_tree


def test_exited_process_has_no_memory() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert processes.pss_bytes([process.pid]) == 0


def test_a_served_process_outside_our_tree_counts_with_its_parents_share() -> None:
    def make(pid: int, parent: int, own: float) -> process_tree.ProcessSample:
        return process_tree.ProcessSample(pid, parent, started=pid, own_s=own, reaped_s=0.0)

    me = make(os.getpid(), 1, 5.0)
    template, other = 900_001, 900_009
    before = {me.pid: me, template: make(template, 1, 7.0), other: make(other, 1, 1.0)}
    served = {900_002: make(900_002, template, 0.5), 900_003: make(900_003, 900_002, 0.25)}
    after = {me.pid: me, template: make(template, 1, 7.125), other: make(other, 1, 4.0), **served}
    assert cpu_between(before, after, served=900_002) == 0.875
    assert cpu_between(before, after) == 0.0
    assert cpu_between(before, after, served=other) == 0.0  # a pid of another namespace: not this start
