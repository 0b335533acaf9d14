"""State that a process must renew after a fork or a thaw: random generators, and the permission to use AMX tiles."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import random

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def renew() -> None:
    """Reseed Python's and numpy's generators and give multiprocessing a new key.

    torch's generator is unchanged: vLLM seeds it with --seed in every server.
    """
    import numpy

    random.seed()
    numpy.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def request_tiles() -> bool:
    """Request the permission to use the processor's AMX tiles. Return False if the processor or the kernel has none.

    Linux grants the AMX state to processes that request it (arch_prctl(2), ARCH_REQ_XCOMP_PERM), and to their children. CRIU
    restores a process without it, and the first tile instruction then raises SIGILL, so a thawed process must ask again.
    """
    if platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
