"""Find and remove shared objects in vLLM's cache that a killed compiler left truncated.

A linker writes a shared object at its final path. If the linker is killed meanwhile, with its server or because memory
ran out, every later start loads the truncated file and crashes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coldstart.artifacts import files
from coldstart.contract.fallback import Fallback

# ELF64 (elf(5)): the section headers lie at the file's end, and the file's head is written after them.
_HEAD, _MAGIC = struct.Struct("<16s24xQ10xHH2x"), b"\x7fELF"


def cleared(cache: Path) -> list[Fallback]:
    """Remove every truncated shared object below `cache` that no process is writing, and return one fallback for each.

    A file that cannot be read or removed stays; the server that loads it reports the error.
    """
    steps = []
    for path in unfinished(cache):
        with suppress(OSError):
            if not _has_writer(path):
                path.unlink()
                reason = f"{path.name} was removed: a killed compiler had left it unfinished"
                steps.append(Fallback("compile", reason))
    return steps


def unfinished(cache: Path) -> Iterator[Path]:
    """Yield the truncated shared objects below `cache`; nothing if the directory does not exist."""
    for path in cache.rglob("*.so"):
        with suppress(OSError):
            if not _whole(path):
                yield path


def _whole(path: Path) -> bool:
    with files.open_regular(path) as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return False
    identity, sections, size, count = _HEAD.unpack(head)
    return (
        bool(identity.startswith(_MAGIC)) and sections > 0 and sections + size * count <= path.stat().st_size
    )


def _has_writer(path: Path) -> bool:
    """Return whether a process has the file open, because the linker of another start is writing it."""
    own = path.stat()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            held = descriptor.stat()
            if (held.st_dev, held.st_ino) == (own.st_dev, own.st_ino):
                return True
    return False
