"""Memory of this process, and state that the process must renew after a fork or a restore.

The memory functions are optimizations: single page faults cost more than the copy of the data. On kernels or C libraries
without the necessary calls, they do nothing.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import random
from contextlib import suppress

from coldstart.system.proc.mappings import LIBC, PAGE

MADV_POPULATE_READ = 22
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def populate_pages(view: memoryview) -> None:
    """Make all pages of a writable mapping present with one call, during which the GIL is released."""
    if view.nbytes:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        start = address // PAGE * PAGE
        LIBC.madvise(start, address + view.nbytes - start, MADV_POPULATE_READ)


def trim_heap() -> None:
    """Return freed memory to the kernel, so that forks and snapshots copy less. This works only with glibc."""
    with suppress(AttributeError):
        LIBC.malloc_trim(0)


def reseed_random_state() -> None:
    """Reseed the random generators of Python and numpy, and replace multiprocessing's authentication key.

    torch's generator is not changed, because vLLM seeds it with --seed in every server.
    """
    import numpy

    random.seed()
    numpy.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def request_amx_tiles() -> bool:
    """Request permission to use the processor's AMX tiles. Return False if the processor or the kernel does not support them.

    Linux grants AMX state to processes that request it (arch_prctl(2), ARCH_REQ_XCOMP_PERM), and to their children. CRIU
    restores a process without this permission, and the first tile instruction then raises SIGILL. So a restored process
    must request it again.
    """
    if platform.machine() != "x86_64":
        return False
    return bool(LIBC.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
