"""Subset of tar for bundles: regular files and directories with safe relative names, each once.

Python's `tarfile` reads and writes the headers. This module limits what they may cost and what they may describe, because an
archive is read before a signature of its content is known.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from io import BufferedReader
from typing import IO, Protocol, cast

from coldstart.artifacts.errors import (
    ArchiveBombError,
    BundleError,
    DuplicateMemberError,
    InvalidTreeError,
    UnsafeLinkError,
    UnsafeMemberError,
    UnsafePathError,
)
from coldstart.artifacts.limits import LIMITS

END = b"\0" * (2 * tarfile.BLOCKSIZE)
_PIECE = 1 << 20
_BROKEN = (tarfile.TarError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError)


class Readable(Protocol):
    """Object with a binary read."""

    def read(self, size: int = -1, /) -> bytes: ...


class Writable(Protocol):
    """Object with a binary write."""

    def write(self, data: bytes, /) -> object: ...


def describe(
    name: str, size: int = 0, *, is_directory: bool = False, executable: bool = False
) -> tarfile.TarInfo:
    """Return a member without time, owner or user name; `size` in bytes."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.type = tarfile.DIRTYPE if is_directory else tarfile.REGTYPE
    info.mode = 0o755 if is_directory or executable else 0o644
    return info


def append(target: Writable, info: tarfile.TarInfo, source: Readable | None = None) -> int:
    """Write the member `info` with `info.size` bytes of `source` and return the bytes of both and of the padding.

    Raises InvalidTreeError if `source` has fewer bytes.
    """
    header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
    target.write(header)
    left = info.size
    while source is not None and left:
        data = source.read(min(_PIECE, left))
        if not data:
            raise InvalidTreeError(
                f"{info.name} shrank while it was read", hint="stop the programs that write to the tree"
            )
        target.write(data)
        left -= len(data)
    padding = -info.size % tarfile.BLOCKSIZE
    target.write(b"\0" * padding)
    return len(header) + info.size + padding


class TarStream:
    """Tar stream that is read forward. A file, whose size is known, is skipped by seeking."""

    def __init__(self, source: Readable) -> None:
        self._source, self._at, self._block = source, 0, b""
        self._file = source if isinstance(source, BufferedReader) else None
        self.header_bytes = 0

    def members(self, cap: int = LIMITS.tree_members) -> Iterator[tarfile.TarInfo]:
        """Yield each member in order; `body` reads its bytes until the next step.

        Raises InvalidTreeError, UnsafePathError, UnsafeLinkError, UnsafeMemberError, DuplicateMemberError, or
        ArchiveBombError above `cap` members and implied directories.
        """
        names = _Names(cap)
        for info in self._headers():
            _check_type(info)
            names.add(info, self.header_bytes - tarfile.BLOCKSIZE)
            yield info
            self.header_bytes = 0

    def body(self, info: tarfile.TarInfo) -> Iterator[bytes]:
        """Yield the bytes of the current member. Raises InvalidTreeError for a truncated stream."""
        left = info.size
        while left:
            data = self._take(min(_PIECE, left))
            if not data:
                raise InvalidTreeError("the tar stream ends inside a member")
            left -= len(data)
            yield data

    def read(self, size: int) -> bytes:
        """Read bytes of a header. Raises ArchiveBombError for one that is too long."""
        self.header_bytes += size
        if self.header_bytes > LIMITS.pax_header + 4 * tarfile.BLOCKSIZE:
            raise ArchiveBombError(f"a tar header of more than {LIMITS.pax_header} bytes")
        self._block = b""
        while len(self._block) < size and (part := self._take(size - len(self._block))):
            self._block += part
        return self._block

    def tell(self) -> int:
        """Return the position in the stream."""
        return self._at

    def seek(self, position: int) -> None:
        """Move forward. Raises InvalidTreeError for a position behind, or after the end."""
        if position < self._at:
            raise InvalidTreeError("a tar header has a negative size")
        if self._file is not None and position <= os.fstat(self._file.fileno()).st_size:
            self._at = self._file.seek(position)
        while self._at < position:
            if not self._take(min(_PIECE, position - self._at)):
                raise InvalidTreeError("the tar stream ends inside a member")

    def _take(self, size: int) -> bytes:
        data = self._source.read(size)
        self._at += len(data)
        return data

    def _headers(self) -> Iterator[tarfile.TarInfo]:
        try:
            archive = tarfile.TarFile(fileobj=cast("IO[bytes]", self), encoding="utf-8", errors="strict")
            while (info := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # Each header would remain in memory.
                yield info
        except BundleError:
            raise
        except _BROKEN as error:
            raise InvalidTreeError(f"malformed tar stream: {error}") from error
        if not self._block or self._block.strip(b"\0"):  # `next` ends silently at a damaged header.
            raise InvalidTreeError("the tar stream is damaged or cut short")


class _Names:
    """Names of one tree. Directories that a name implies count as members, so their number is limited."""

    def __init__(self, cap: int) -> None:
        self._cap, self._length = cap, 0
        self._files: set[str] = set()
        self._directories: set[str] = set()

    def add(self, info: tarfile.TarInfo, extra_bytes: int) -> None:
        check_name(info.name)
        known = self._directories if info.isreg() else self._files
        if info.name in self._files or info.name in known:
            raise DuplicateMemberError(f"{info.name!r} appears twice")
        self._enter(info.name, self._files if info.isreg() else self._directories)
        self._length += extra_bytes
        parent = info.name.rpartition("/")[0]
        while parent and parent not in self._directories:
            if parent in self._files:
                raise UnsafePathError(f"{info.name!r} is below a file")
            self._enter(parent, self._directories)
            parent = parent.rpartition("/")[0]

    def _enter(self, name: str, names: set[str]) -> None:
        names.add(name)
        self._length += len(name)
        if len(self._files) + len(self._directories) > self._cap:
            raise ArchiveBombError(f"more than {self._cap} members, with the directories above them")
        if self._length > LIMITS.tree_names:
            raise ArchiveBombError(f"the names of the members have more than {LIMITS.tree_names} bytes")


def check_name(name: str) -> None:
    """Raise UnsafePathError unless `name` is relative, plain and portable."""
    if len(name) > LIMITS.path or name.count("/") >= LIMITS.path_depth:
        raise UnsafePathError(f"{name[:200]!r} has more than {LIMITS.path_depth} components, or is too long")
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise UnsafePathError(f"{name[:200]!r} is not a plain relative path")
    if not name.isprintable() or "\\" in name or ":" in parts[0][1:2]:
        raise UnsafePathError(f"{name[:200]!r} has characters that no portable path has")
    if len(name) > 63 and max(len(part.encode()) for part in parts) > 255:
        raise UnsafePathError(f"{name[:200]!r} has a component of more than 255 bytes")


def _check_type(info: tarfile.TarInfo) -> None:
    if info.issym() or info.islnk():
        raise UnsafeLinkError(f"{info.name[:200]!r} is a link")
    is_sparse = info.sparse is not None or any(name.startswith("GNU.sparse") for name in info.pax_headers)
    if is_sparse or not (info.isdir() or info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)):
        raise UnsafeMemberError(f"{info.name[:200]!r} is of the special type {info.type!r}")
    if info.size < 0 or (info.isdir() and info.size):
        raise InvalidTreeError(f"{info.name[:200]!r} has the size {info.size}")
