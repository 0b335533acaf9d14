"""Ending with whoever started us: no server outlives its supervisor, no engine its server."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
