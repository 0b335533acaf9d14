"""Directories as one solid tar.zst: equal trees give equal bytes (names sorted, no times, no owners).

A reader has a fixed budget: min(cap, declared size, ratio x compressed size). The extracted directory appears complete or not
at all, and only after the digest of the blob was checked.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tarfile import TarInfo
from typing import BinaryIO, NamedTuple
from uuid import uuid4

import zstandard
from coldstart.artifacts import files, tar
from coldstart.artifacts.blobs import VerifiedReader
from coldstart.artifacts.errors import (
    ArchiveBombError,
    DestinationExistsError,
    DuplicateMemberError,
    InvalidTreeError,
    UnsafeLinkError,
    UnsafeMemberError,
    UnsafePathError,
    named_os_errors,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.manifest import MEMBERS, UNPACKED, SectionEntry

_WINDOW = 1 << 27


class Packed(NamedTuple):
    """Result of packing: number of members, and bytes of the tar stream before compression."""

    members: int
    unpacked: int


class Member(NamedTuple):
    """Member of a tree; `size` in bytes."""

    name: str
    size: int
    is_directory: bool


def pack(
    directory: Path, sink: BinaryIO, *, level: int, threads: int, follow_symlinks: bool = False
) -> Packed:
    """Write `directory` to `sink`. With `follow_symlinks`, links to files are stored as their target files.

    The bytes depend on `level` and on whether `threads` is 0, not on the number of threads. Raises UnsafeLinkError,
    UnsafeMemberError, UnsafePathError, InvalidTreeError (a file changed).
    """
    compressor = zstandard.ZstdCompressor(level=level, threads=threads, write_checksum=False)
    members, unpacked = 0, len(tar.END)
    with compressor.stream_writer(sink, closefd=False) as writer:
        for path, info in _walk(directory, follow_symlinks):
            members += 1
            if info.isdir():
                unpacked += tar.append(writer, info)
                continue
            with files.open_regular(path) as file:
                unpacked += tar.append(writer, info, file)
        writer.write(tar.END)
    return Packed(members, unpacked)


def _walk(directory: Path, follow: bool) -> Iterator[tuple[Path, TarInfo]]:
    if not directory.is_dir():
        raise InvalidTreeError(f"{directory.name} is not a directory", hint="specify an existing directory")
    for name in sorted(_names(directory, "")):
        yield directory / name, _describe(directory / name, name, follow)


def _names(directory: Path, above: str) -> Iterator[str]:
    """Yield the name of each entry, relative to the packed directory; `above` is that of `directory` and a slash."""
    for entry in os.scandir(directory):
        name = above + entry.name
        tar.check_name(name)
        yield name
        if entry.is_dir(follow_symlinks=False):
            yield from _names(Path(entry.path), f"{name}/")


def _describe(path: Path, name: str, follow: bool) -> TarInfo:
    status = path.stat() if follow else path.lstat()
    if stat.S_ISLNK(status.st_mode) or (path.is_symlink() and stat.S_ISDIR(status.st_mode)):
        raise UnsafeLinkError(f"{name} is a link", hint="resolve the links in a copy of the tree")
    if stat.S_ISDIR(status.st_mode):
        return tar.describe(name, is_directory=True)
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeMemberError(f"{name} is neither a file nor a directory", hint="remove it from the tree")
    return tar.describe(name, status.st_size, executable=bool(status.st_mode & 0o100))


class _Budgeted:
    """Decompressed stream that raises ArchiveBombError above `budget` bytes and InvalidTreeError for malformed zstd."""

    def __init__(self, source: tar.Readable, budget: int) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self._reader = decompressor.stream_reader(source, read_across_frames=True, closefd=False)  # type: ignore[arg-type]
        self._left = budget

    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._reader.read(min(size, self._left + 1))
        except zstandard.ZstdError as error:
            raise InvalidTreeError(f"malformed zstd stream: {error}") from error
        self._left -= len(data)
        if self._left < 0:
            raise ArchiveBombError("the section unpacks to more bytes than allowed")
        return data


def scan(reader: VerifiedReader, entry: SectionEntry) -> list[Member]:
    """Read a tree to its end without writing and return its members. Raises the errors of `extract`."""
    return _read(reader, entry, None)


def extract(reader: VerifiedReader, entry: SectionEntry, dest: Path) -> int:
    """Unpack to the new directory `dest` and return the number of members.

    Raises DestinationExistsError, DigestMismatchError, ArchiveBombError, InvalidTreeError, UnsafePathError, UnsafeLinkError,
    UnsafeMemberError, DuplicateMemberError, NoSpaceError, ReadOnlyStoreError.
    """
    if os.path.lexists(dest):
        raise DestinationExistsError(f"{dest.name} exists already")
    partial = dest.with_name(f".{dest.name}.{uuid4().hex}.partial")
    with named_os_errors(f"extracting {entry.type}"):
        partial.mkdir(parents=True)
        try:
            members = _read(reader, entry, partial)
            _rename(partial, dest)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return len(members)


def _rename(partial: Path, dest: Path) -> None:
    try:
        partial.rename(dest)
    except OSError as error:
        if dest.exists():
            raise DestinationExistsError(
                f"another process created {dest.name} during the extraction"
            ) from error
        raise


def _read(reader: VerifiedReader, entry: SectionEntry, target: Path | None) -> list[Member]:
    try:
        members = read_members(tar.TarStream(_Budgeted(reader, _budget(entry))), target)
    finally:
        # Damage shows first as a malformed stream; the digest distinguishes damage from malice.
        reader.drain()
    declared = entry.annotations.get(MEMBERS, "")
    if _is_count(declared) and int(declared) != len(members):
        raise InvalidTreeError(f"section {entry.type} has {len(members)} members and declares {declared}")
    return members


def read_members(stream: tar.TarStream, target: Path | None) -> list[Member]:
    """Return the members of a stream, written below the directory `target` if there is one.

    Raises the errors of `TarStream.members`.
    """
    members = list[Member]()
    for info in stream.members():
        members.append(Member(info.name, info.size, info.isdir()))
        if target is not None:
            _write(stream, info, target / info.name)
    return members


def _budget(entry: SectionEntry) -> int:
    """Return the maximum number of bytes that the section may unpack to."""
    allowed = min(LIMITS.tree, max(LIMITS.ratio_floor, LIMITS.tree_ratio * entry.size))
    declared = entry.annotations.get(UNPACKED, "")
    return min(allowed, int(declared)) if _is_count(declared) else allowed


def _write(stream: tar.TarStream, info: TarInfo, path: Path) -> None:
    with _named_conflicts(info.name):
        if info.isdir():
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = files.create(path, 0o755 if info.mode & 0o100 else 0o644)
    with handle as file:
        for data in stream.body(info):
            file.write(data)


@contextmanager
def _named_conflicts(name: str) -> Iterator[None]:
    """Raise named errors for names that this file system, unlike the format, does not distinguish or allow."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise DuplicateMemberError(
                f"{name[:200]!r} and another member have the same name on this file system"
            ) from error
        if error.errno in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
            raise UnsafePathError(
                f"{name[:200]!r} is not a valid name on this file system: {error.strerror}"
            ) from error
        raise


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18
