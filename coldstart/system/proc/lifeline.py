"""End a process with its parent, so that no server outlives its supervisor and no engine outlives its server."""

from __future__ import annotations

import ctypes
import os
import signal
from types import FrameType

from coldstart.contract import environment

SUPERVISOR_ENV = environment.SUPERVISOR_PID
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def die_as_a_group() -> None:
    """Apply `die_with_supervisor` to the first process of a group: its SIGTERM kills the complete group.

    A process that it has forked ends alone.
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
    """Apply `die_with_parent` in a process that was started with its parent's PID. Exit at once if the parent has ended."""
    die_with_parent()
    supervisor = os.environ.pop(SUPERVISOR_ENV, None)
    if supervisor is not None and os.getppid() != int(supervisor):
        os._exit(128 + signal.SIGTERM)
