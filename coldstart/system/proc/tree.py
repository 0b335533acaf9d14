"""A process with its descendants: whether any of them is suspended, and SIGKILL for all of them.

psutil identifies a process by PID and start time, so no signal reaches another process with a reused PID.
"""

from __future__ import annotations

from contextlib import suppress
from math import inf

import psutil


class ProcessTree:
    """Process and all its descendants seen so far. A process that does not exist has no descendants."""

    def __init__(self, pid: int) -> None:
        self._seen: set[psutil.Process] = set()
        self.pid, self._began = pid, inf
        with suppress(psutil.Error):
            first = psutil.Process(pid)
            self._seen.add(first)
            self._began = first.create_time()

    def adopt(self, pid: int) -> None:
        """Add a process, such as a server that a template forked, unless it is older than the root of this tree."""
        with suppress(psutil.Error):
            if (process := psutil.Process(pid)).create_time() >= self._began:
                self._seen.add(process)

    def list_processes(self) -> set[psutil.Process]:
        """Return the living processes, and remember them, because the descendants of a dead process cannot be found later."""
        for one in list(self._seen):
            with suppress(psutil.Error):
                self._seen.update(one.children(recursive=True))
        # A copy, because another thread may look at the same time.
        self._seen = {one for one in list(self._seen) if one.is_running()}
        return self._seen

    def is_stopped(self) -> bool:
        """Return whether any of the processes is suspended (state T)."""
        for one in self.list_processes():
            with suppress(psutil.Error):
                if one.status() == psutil.STATUS_STOPPED:
                    return True
        return False

    def kill(self) -> None:
        """Send SIGKILL, which also ends suspended processes, to every process, parents first."""
        # Creation times are too coarse: a child that is forked immediately has the same time as its parent.
        for one in sorted(self.list_processes(), key=_count_ancestors):
            with suppress(psutil.Error):
                one.kill()


def _count_ancestors(process: psutil.Process) -> int:
    try:
        return len(process.parents())
    except psutil.Error:
        return 0
