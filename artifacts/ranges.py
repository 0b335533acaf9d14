"""Verified reads of a part of a blob: only the chunks that cover the range are read and hashed.

Chunk i of a blob is bytes [i*16 MiB, (i+1)*16 MiB). A blob of at most one chunk is its own chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import BinaryIO

from coldstart.artifacts.errors import DigestMismatchError
from coldstart.artifacts.limits import CHUNK
from coldstart.artifacts.manifest import SectionEntry


def chunk_digests(entry: SectionEntry) -> tuple[str, ...]:
    """Return the hex digest of each chunk; one for a small blob, none if a large blob lists none."""
    if entry.chunks or entry.size > CHUNK:
        return entry.chunks
    return (entry.digest.removeprefix("sha256:"),)


def read_range(file: BinaryIO, entry: SectionEntry, offset: int, length: int) -> bytes:
    """Return bytes [offset, offset+length). Raises DigestMismatchError if a chunk that covers them is damaged."""
    digests = chunk_digests(entry)
    if not digests:
        raise DigestMismatchError(
            f"section {entry.type} lists no chunks", hint="read the whole section: Bundle.open_blob"
        )
    first, last = offset // CHUNK, max(offset, offset + length - 1) // CHUNK
    parts = [_chunk(file, entry, digests, number) for number in range(first, min(last + 1, len(digests)))]
    start = offset - first * CHUNK
    return b"".join(parts)[start : start + length]


def span(entry: SectionEntry, number: int) -> tuple[int, int]:
    """Return offset and length of a chunk in bytes."""
    offset = number * CHUNK
    return offset, min(CHUNK, entry.size - offset)


def pieces(file: BinaryIO, entry: SectionEntry) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each chunk and its bytes in the file."""
    for number in range(len(chunk_digests(entry))):
        offset, length = span(entry, number)
        file.seek(offset)
        yield number, read_full(file, length)


def read_full(file: BinaryIO, length: int) -> bytes:
    """Read up to `length` bytes, fewer only at the end of the file."""
    parts = []
    while length and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _chunk(file: BinaryIO, entry: SectionEntry, digests: tuple[str, ...], number: int) -> bytes:
    offset, length = span(entry, number)
    file.seek(offset)
    data = read_full(file, length)
    if sha256(data).hexdigest() != digests[number]:
        raise DigestMismatchError(f"chunk {number} of section {entry.type} ({entry.digest}) is damaged")
    return data
