"""Pack a directory as one solid tar.zst; equal trees give equal bytes (names sorted, no times, no owners).

Level 10 is for small components; a process snapshot of gigabytes uses level 1 to 3 and several threads.
Output depends on `level` and on whether `threads` is 0, not on the number of threads.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard
from coldstart.artifacts import tar
from coldstart.artifacts.errors import InvalidTreeError, UnsafeLinkError, UnsafeMemberError
from coldstart.artifacts.files import open_regular
from coldstart.artifacts.member_names import MemberNames, check_name

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Packed:
    """Result of packing: number of members, and bytes of the tar stream before compression."""

    members: int
    unpacked: int


@dataclass(slots=True)
class _Counter:
    target: zstandard.ZstdCompressionWriter
    seen: int = 0

    def write(self, data: bytes) -> None:
        self.target.write(data)
        self.seen += len(data)


def pack(
    directory: Path,
    sink: BinaryIO,
    *,
    level: int,
    threads: int,
    follow_symlinks: bool = False,
) -> Packed:
    """Write `directory` to `sink`. With `follow_symlinks`, links to files are stored as their target files.

    Raises UnsafeLinkError, UnsafeMemberError, UnsafePathError, ArchiveBombError (too many members or too long
    names), InvalidTreeError (a file changed).
    """
    compressor = zstandard.ZstdCompressor(level=level, threads=threads, write_checksum=False)
    with compressor.stream_writer(sink, closefd=False) as writer:
        counter, names, members = _Counter(writer), MemberNames(), 0
        for path, member in _walk(directory, follow_symlinks):
            members += 1
            names.add(member.name, is_directory=member.is_directory)
            counter.write(tar.header(member))
            if not member.is_directory:
                _write_file(path, member, counter)
        counter.write(tar.END)
    return Packed(members, counter.seen)


def _walk(directory: Path, follow: bool) -> Iterator[tuple[Path, tar.Member]]:
    if not directory.is_dir():
        raise InvalidTreeError(f"{directory.name} is not a directory", hint="name an existing directory")
    for name in sorted(_names(directory, "")):
        path = directory / name
        yield path, _member(path, name, follow)


def _names(directory: Path, above: str) -> Iterator[str]:
    """Yield the name of each entry, relative to the packed directory; `above` is that of `directory` and a slash."""
    for entry in os.scandir(directory):
        name = above + entry.name
        check_name(name)
        yield name
        if entry.is_dir(follow_symlinks=False):
            yield from _names(Path(entry.path), f"{name}/")


def _member(path: Path, name: str, follow: bool) -> tar.Member:
    status = path.stat() if follow else path.lstat()
    if stat.S_ISLNK(status.st_mode) or (path.is_symlink() and stat.S_ISDIR(status.st_mode)):
        raise UnsafeLinkError(f"{name} is a link", hint="resolve the links in a copy of the tree")
    if stat.S_ISDIR(status.st_mode):
        return tar.Member(name, 0, is_directory=True)
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeMemberError(f"{name} is neither a file nor a directory", hint="remove it from the tree")
    return tar.Member(name, status.st_size, executable=bool(status.st_mode & 0o100))


def _write_file(path: Path, member: tar.Member, counter: _Counter) -> None:
    with open_regular(path) as file:
        data = file.read(min(_PIECE, member.size))
        left = member.size
        while data:
            counter.write(data)
            left -= len(data)
            data = file.read(min(_PIECE, left))
    if left:
        raise InvalidTreeError(
            f"{member.name} shrank while it was read", hint="stop the programs that write to the tree"
        )
    counter.write(tar.padding(member.size))
