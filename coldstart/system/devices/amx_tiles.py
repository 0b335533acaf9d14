"""Permission to use the processor's AMX tile registers.

Linux grants the AMX state to processes that request it (arch_prctl(2), ARCH_REQ_XCOMP_PERM). Children inherit the permission.
CRIU restores a process without it, and the first tile instruction then raises SIGILL, so a thawed process must ask again.
"""

from __future__ import annotations

import ctypes
import platform

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def ask() -> bool:
    """Request the permission for this process. Return False if the processor or the kernel has no AMX."""
    if platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
