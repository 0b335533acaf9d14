"""Cubins in a library: NVIDIA's fat binaries, compressed or not.

A library's section .nv_fatbin is a sequence of containers: u32 magic, u16 version, u16 header bytes, u64
bytes after the header. A container has entries: u16 kind (1 PTX, 2 cubin), u16, u32 header bytes, u64 payload
bytes, u32 used payload bytes, u64 flags at 40 (0x8000: a zstd frame, 0x2000: LZ4), u64 unpacked bytes at 48.
The format is not documented: it was derived from files of CUDA 13.0, and the tests compare with `cuobjdump`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from coldstart.graphs.elf import Buffer, spans
from coldstart.graphs.errors import AlteredTableError, MissingKernelError

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC, ZSTD_MAGIC = 0xBA55ED50, b"\x28\xb5\x2f\xfd"
CUBIN, LZ4, ZSTD = 2, 0x2000, 0x8000
LARGEST = 1 << 30
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQI8xI8xQQ")


@dataclass(frozen=True)
class FatbinEntry:
    """Position of a packed cubin in the file, in bytes; `architecture` is 80, 90, ..."""

    offset: int
    size: int
    architecture: int


def library_entries(library: Buffer) -> Iterator[FatbinEntry]:
    """Yield every cubin of a shared library or fat binary that `unpack` can read. Raises AlteredTableError."""
    try:
        if library[:4] == MAGIC.to_bytes(4, "little"):
            yield from entries(library, 0, len(library))
            return
        for name, offset, size in spans(library):
            if name in SECTIONS:
                yield from entries(library, offset, offset + size)
    except (struct.error, ValueError, IndexError) as error:
        raise AlteredTableError(f"cannot read the CUDA fat binaries of a library: {error}") from error


def entries(data: Buffer, at: int, end: int) -> Iterator[FatbinEntry]:
    """Yield the cubins of the containers between two positions, without LZ4, which nvcc wrote before 12.8."""
    while at + _CONTAINER.size <= end:
        magic, _, head, size = _CONTAINER.unpack_from(data, at)
        if magic != MAGIC:
            at += 8  # containers are aligned
            continue
        yield from _container(data, at + head, at + head + size)
        at += head + size


def _container(data: Buffer, at: int, end: int) -> Iterator[FatbinEntry]:
    while at + _ENTRY.size <= end:
        kind, _, head, size, used, architecture, flags, _ = _ENTRY.unpack_from(data, at)
        if not head:
            return
        if kind == CUBIN and not flags & LZ4:
            yield FatbinEntry(at + head, used if flags & ZSTD else size, architecture)
        at += head + size


def unpack(packed: bytes) -> bytes:
    """Return the cubin of an entry's bytes. Raises AlteredTableError, or MissingKernelError without zstandard."""
    if packed[:4] != ZSTD_MAGIC:
        return packed
    try:
        import zstandard  # imported here: the check on a GPU machine without our dependencies needs none
    except ImportError as error:
        raise MissingKernelError("cannot unpack a kernel binary: zstandard is not installed") from error

    try:
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=LARGEST)
    except zstandard.ZstdError as error:
        raise AlteredTableError(f"cannot unpack a kernel binary: {error}") from error
