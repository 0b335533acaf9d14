"""CPU seconds of a start, as the difference between two snapshots of all processes.

CPU time is conserved: the time of a process moves to its parent's `cutime + cstime` when the parent waits for it, so the sum of
(own + reaped) over a tree loses nothing while no process leaves the tree. A server that a template forked or a snapshot
restored is a new process: all of its time counts; of the template, the time between the snapshots counts.
"""

from __future__ import annotations

import os

from coldstart.validate.process_tree import ProcessSample, Snapshot, find_earlier, tree


def cpu_between(before: Snapshot, after: Snapshot, served: int | None = None) -> float:
    """Return the CPU seconds of this process's descendants, and of the served process and its parent.

    This process's own time (the client's polling) is left out; children that it reaped meanwhile count.
    """
    me = os.getpid()
    pids = tree(after, [me])
    if served in after and served not in pids and find_earlier(before, after[served]) is None:
        pids |= tree(after, [served]) | {after[served].parent}
    spent = sum(_spent(before, after[pid]) for pid in pids - {me, 0, 1} if pid in after)
    return spent + after[me].reaped_s - before[me].reaped_s


def _spent(before: Snapshot, now: ProcessSample) -> float:
    then = find_earlier(before, now)
    return now.own_s + now.reaped_s - (then.own_s + then.reaped_s if then else 0.0)
