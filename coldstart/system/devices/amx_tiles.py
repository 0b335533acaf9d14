"""Leave to use the processor's tile registers (AMX), asked for again where a process has lost it.

Linux gives the state of AMX to processes that ask (arch_prctl(2), ARCH_REQ_XCOMP_PERM); children inherit the leave, and CRIU
restores a process without it: its first tile instruction is then an illegal one.
"""

from __future__ import annotations

import ctypes
import platform

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def ask() -> bool:
    """Whether this process may use them from here on; False on a processor or kernel without."""
    if platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
