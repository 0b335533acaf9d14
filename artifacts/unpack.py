"""Unpack a tree section within a budget known beforehand: min(cap, declared size, ratio x compressed size).

The directory appears whole or not at all, and only after the digest of the blob was checked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import zstandard
from coldstart.artifacts import tar
from coldstart.artifacts.blobs import VerifiedReader
from coldstart.artifacts.content import HEAD, check_plain
from coldstart.artifacts.errors import (
    ArchiveBombError,
    BundleError,
    DestinationExistsError,
    InvalidTreeError,
    named_os_errors,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.manifest import MEMBERS, UNPACKED, SectionEntry

_WINDOW = 1 << 27


class Budgeted:
    """A decompressed stream that raises Bomb past `budget` bytes and InvalidTreeError on malformed zstd."""

    def __init__(self, source: tar.Readable, budget: int) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self._reader = decompressor.stream_reader(source, read_across_frames=True, closefd=False)  # type: ignore[arg-type]
        self._left = budget

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes."""
        try:
            data = self._reader.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        except zstandard.ZstdError as error:
            raise InvalidTreeError(f"malformed zstd stream: {error}") from error
        self._left -= len(data)
        if self._left < 0:
            raise ArchiveBombError("the section unpacks to more bytes than it may")
        return data


def budget(entry: SectionEntry) -> int:
    """The most bytes that the section may unpack to."""
    allowed = min(LIMITS.tree, max(LIMITS.ratio_floor, LIMITS.tree_ratio * entry.size))
    declared = entry.annotations.get(UNPACKED, "")
    return min(allowed, int(declared)) if _is_count(declared) else allowed


def scan(reader: VerifiedReader, entry: SectionEntry, *, plain: bool) -> int:
    """Read a tree through without writing; the number of members. Raises what `extract` raises."""
    return _consume(reader, entry, plain=plain, target=None)


def extract(reader: VerifiedReader, entry: SectionEntry, dest: Path, *, plain: bool) -> int:
    """Unpack to the new directory `dest`; the number of members. `plain` refuses pickles and code.

    Raises DestinationExistsError, DigestMismatchError, ArchiveBombError, InvalidTreeError, UnsafePathError, UnsafeLinkError,
    UnsafeMemberError,
    DuplicateMemberError, PickleFoundError, CodeFoundError, NoSpaceError, ReadOnlyStoreError.
    """
    if dest.exists() or dest.is_symlink():
        raise DestinationExistsError(f"{dest.name} exists already")
    with named_os_errors(f"extracting {entry.type}"), _partial(dest) as partial:
        count = _consume(reader, entry, plain=plain, target=partial)
        _rename(partial, dest)
    return count


@contextmanager
def _partial(dest: Path) -> Iterator[Path]:
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial = dest.with_name(f".{dest.name}.{uuid4().hex}.partial")
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, dest: Path) -> None:
    try:
        partial.rename(dest)
    except OSError as error:
        if dest.exists():
            raise DestinationExistsError(f"{dest.name} was made meanwhile") from error
        raise


def _consume(reader: VerifiedReader, entry: SectionEntry, *, plain: bool, target: Path | None) -> int:
    try:
        count = _members(Budgeted(reader, budget(entry)), plain=plain, target=target)
    except BundleError:
        # Damage shows first as a malformed stream; the digest tells damage from malice.
        reader.drain()
        raise
    reader.drain()
    declared = entry.annotations.get(MEMBERS, "")
    if _is_count(declared) and int(declared) != count:
        raise InvalidTreeError(f"section {entry.type} has {count} members and declares {declared}")
    return count


def _members(stream: Budgeted, *, plain: bool, target: Path | None) -> int:
    count = 0
    for member, body in tar.members(stream):
        count += 1
        if target and member.is_directory:
            (target / member.name).mkdir(parents=True, exist_ok=True)
        elif not member.is_directory:
            _file(member, body, plain=plain, target=target)
    return count


def _file(member: tar.Member, body: tar.Body, *, plain: bool, target: Path | None) -> None:
    head = body.read(HEAD)
    while len(head) < HEAD and (more := body.read(HEAD - len(head))):
        head += more
    if plain:
        check_plain(member.name, head)
    if not target:
        return
    path = target / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if member.executable else 0o644)
    with os.fdopen(handle, "wb", buffering=0) as file:
        file.write(head)
        tar.copy(body, file)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18
