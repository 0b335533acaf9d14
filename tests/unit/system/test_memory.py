"""Freed memory returns to the kernel; the tests of the loader cover the other memory hints."""

from __future__ import annotations

import ctypes
from pathlib import Path

from coldstart.system.proc import memory

_PIECE, _PIECES = 1 << 12, 1 << 13


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_trim_returns_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    held = [libc.malloc(_PIECE) for _ in range(_PIECES)]
    for piece in held:
        ctypes.memset(piece, 1, _PIECE)
    last = libc.malloc(_PIECE)  # above them: the heap retains memory below it by default
    for piece in held:
        libc.free(piece)
    before = _resident_bytes()
    memory.give_back()
    assert before - _resident_bytes() > _PIECE * _PIECES // 2
    libc.free(last)
