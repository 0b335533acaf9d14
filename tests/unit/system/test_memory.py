"""What was freed is the kernel's again; the rest of memory's hints are proved where weights are loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

from coldstart.system.proc import memory

_PIECE, _PIECES = 1 << 12, 1 << 13


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_was_freed_leaves() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    held = [libc.malloc(_PIECE) for _ in range(_PIECES)]
    for piece in held:
        ctypes.memset(piece, 1, _PIECE)
    last = libc.malloc(_PIECE)  # above them: without being asked the heap keeps what lies below
    for piece in held:
        libc.free(piece)
    before = _resident_bytes()
    memory.give_back()
    assert before - _resident_bytes() > _PIECE * _PIECES // 2
    libc.free(last)
