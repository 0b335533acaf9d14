"""What a killed compiler has left in vLLM's cache: shared objects that end too early.

A linker writes a shared object in the place where it is looked for. Where it is killed meanwhile, with a server that was
compiling or for want of memory, every later start finds the file, loads it, and dies of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coldstart.contract.fallback import Fallback

# ELF64 (elf(5)): the section headers lie at the file's end, and the file's head is written after them.
_HEAD, _MAGIC = struct.Struct("<16s24xQ10xHH2x"), b"\x7fELF"


def cleared(cache: Path) -> list[Fallback]:
    """Remove every unfinished shared object below `cache` that nobody is writing; what was removed, as steps down.

    Whatever cannot be read or removed is left to whoever loads it.
    """
    steps = []
    for path in unfinished(cache):
        with suppress(OSError):
            if not _written_by_somebody(path):
                path.unlink()
                reason = f"{path.name} was removed, which a compiler that was killed had left unfinished"
                steps.append(Fallback("compile", reason))
    return steps


def unfinished(cache: Path) -> Iterator[Path]:
    """Shared objects below `cache` that are not whole; none where there is no such directory."""
    for path in cache.rglob("*.so"):
        with suppress(OSError):
            if not _whole(path):
                yield path


def _whole(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return False
    identity, sections, size, count = _HEAD.unpack(head)
    return (
        bool(identity.startswith(_MAGIC)) and sections > 0 and sections + size * count <= path.stat().st_size
    )


def _written_by_somebody(path: Path) -> bool:
    """Whether a process has it open: another start's linker is at work."""
    own = path.stat()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            held = descriptor.stat()
            if (held.st_dev, held.st_ino) == (own.st_dev, own.st_ino):
                return True
    return False
