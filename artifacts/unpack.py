"""Unpack a tree section within a fixed budget: min(cap, declared size, ratio x compressed size).

The directory appears complete or not at all, and only after the digest of the blob was checked.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import zstandard
from coldstart.artifacts import tar
from coldstart.artifacts.blobs import VerifiedReader
from coldstart.artifacts.errors import (
    ArchiveBombError,
    BundleError,
    DestinationExistsError,
    DuplicateMemberError,
    InvalidTreeError,
    UnsafePathError,
    named_os_errors,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.manifest import MEMBERS, UNPACKED, SectionEntry

_WINDOW = 1 << 27
_SAME_NAME = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
_NO_NAME = frozenset({errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL})


class Budgeted:
    """Decompressed stream that raises ArchiveBombError above `budget` bytes and InvalidTreeError for malformed zstd."""

    def __init__(self, source: tar.Readable, budget: int) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self._reader = decompressor.stream_reader(source, read_across_frames=True, closefd=False)  # type: ignore[arg-type]
        self._left = budget

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes."""
        try:
            data = self._reader.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        except zstandard.ZstdError as error:
            raise InvalidTreeError(f"malformed zstd stream: {error}") from error
        self._left -= len(data)
        if self._left < 0:
            raise ArchiveBombError("the section unpacks to more bytes than allowed")
        return data


def budget(entry: SectionEntry) -> int:
    """Return the maximum number of bytes that the section may unpack to."""
    allowed = min(LIMITS.tree, max(LIMITS.ratio_floor, LIMITS.tree_ratio * entry.size))
    declared = entry.annotations.get(UNPACKED, "")
    return min(allowed, int(declared)) if _is_count(declared) else allowed


def scan(reader: VerifiedReader, entry: SectionEntry) -> int:
    """Read a tree to its end without writing and return the number of members. Raises the errors of `extract`."""
    return _consume(reader, entry, None)


def extract(reader: VerifiedReader, entry: SectionEntry, dest: Path) -> int:
    """Unpack to the new directory `dest` and return the number of members.

    Raises DestinationExistsError, DigestMismatchError, ArchiveBombError, InvalidTreeError, UnsafePathError, UnsafeLinkError,
    UnsafeMemberError, DuplicateMemberError, NoSpaceError, ReadOnlyStoreError.
    """
    if dest.exists() or dest.is_symlink():
        raise DestinationExistsError(f"{dest.name} exists already")
    with named_os_errors(f"extracting {entry.type}"), _partial(dest) as partial:
        count = _consume(reader, entry, partial)
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
            raise DestinationExistsError(
                f"another process created {dest.name} during the extraction"
            ) from error
        raise


def _consume(reader: VerifiedReader, entry: SectionEntry, target: Path | None) -> int:
    try:
        count = _members(Budgeted(reader, budget(entry)), target)
    except BundleError:
        # Damage shows first as a malformed stream; the digest distinguishes damage from malice.
        reader.drain()
        raise
    reader.drain()
    declared = entry.annotations.get(MEMBERS, "")
    if _is_count(declared) and int(declared) != count:
        raise InvalidTreeError(f"section {entry.type} has {count} members and declares {declared}")
    return count


def _members(stream: Budgeted, target: Path | None) -> int:
    count, tree = 0, Tree(target) if target else None
    for member, body in tar.members(stream):
        count += 1
        if tree and member.is_directory:
            tree.make_directory(member.name)
        elif tree:
            with tree.create_file(member) as file:
                tar.copy(body, file)
    return count


class Tree:
    """Directory that members are extracted to; each directory is created once."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._directories = {""}

    def make_directory(self, name: str) -> None:
        """Create a directory and its missing parents. Raises DuplicateMemberError, UnsafePathError, OSError."""
        if name in self._directories:
            return
        self.make_directory(name.rpartition("/")[0])
        with _named_conflicts(name):
            os.mkdir(f"{self._root}/{name}")  # noqa: PTH102 - a Path for each name costs more than the call
        self._directories.add(name)

    def create_file(self, member: tar.Member) -> BinaryIO:
        """Create a file and its missing parents. Raises DuplicateMemberError, UnsafePathError, OSError."""
        self.make_directory(member.name.rpartition("/")[0])
        mode = 0o755 if member.executable else 0o644
        with _named_conflicts(member.name):
            handle = os.open(f"{self._root}/{member.name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        return os.fdopen(handle, "wb", buffering=0)


@contextmanager
def _named_conflicts(name: str) -> Iterator[None]:
    """Raise named errors for names that this file system, unlike the format, does not distinguish or allow."""
    try:
        yield
    except OSError as error:
        if error.errno in _SAME_NAME:
            raise DuplicateMemberError(
                f"{name[:200]!r} and another member have the same name on this file system"
            ) from error
        if error.errno in _NO_NAME:
            raise UnsafePathError(
                f"{name[:200]!r} is not a valid name on this file system: {error.strerror}"
            ) from error
        raise


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18
