"""Tie the life of a process to its parent, so that no server outlives its supervisor, and no engine outlives its server."""

from __future__ import annotations

import ctypes
import os
import signal
from types import FrameType

from coldstart.contract import environment

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Make the kernel send signal `number` to this process when the thread that started it exits (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def die_as_a_group() -> None:
    """Apply `die_with_supervisor`. If this process leads its process group, make SIGTERM kill the complete group.

    In a process that the leader forked later, SIGTERM ends only that process.
    """
    first = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() == os.getpgrp() == first:
            os.killpg(first, signal.SIGKILL)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    die_with_supervisor()


def die_with_supervisor() -> None:
    """Apply `die_with_parent`. Exit at once if the supervisor named in the environment is no longer the parent process."""
    die_with_parent()
    supervisor = os.environ.pop(environment.SUPERVISOR_PID, None)
    if supervisor is not None and os.getppid() != int(supervisor):
        os._exit(128 + signal.SIGTERM)
