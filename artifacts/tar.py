"""The subset of tar that a bundle may use: regular files and directories with safe relative names, each once.

Headers are ustar, with pax records for long names and sizes. Links, devices, FIFOs and sparse files are
refused.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO, Protocol

from coldstart.artifacts.errors import (
    ArchiveBombError,
    DuplicateMemberError,
    InvalidTreeError,
    UnsafeLinkError,
    UnsafeMemberError,
    UnsafePathError,
)
from coldstart.artifacts.limits import LIMITS

BLOCK = tarfile.BLOCKSIZE
END = b"\0" * (2 * BLOCK)
_LINKS = frozenset({tarfile.LNKTYPE, tarfile.SYMTYPE})


class Readable(Protocol):
    """Anything with a binary read."""

    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Member:
    """One entry: `size` in bytes (0 for a directory)."""

    name: str
    size: int
    is_directory: bool = False
    executable: bool = False


def header(member: Member) -> bytes:
    """Deterministic header bytes: no times, owners or names of users."""
    info = tarfile.TarInfo(member.name)
    info.size = member.size
    info.type = tarfile.DIRTYPE if member.is_directory else tarfile.REGTYPE
    info.mode = 0o755 if member.is_directory or member.executable else 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padding(size: int) -> bytes:
    """The zeros that fill the last block of a member of `size` bytes."""
    return b"\0" * (-size % BLOCK)


class Body:
    """The bytes of the current member; what the consumer leaves is skipped."""

    def __init__(self, stream: Readable, size: int) -> None:
        self._stream, self._left = stream, size
        self._pad = -size % BLOCK

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes.

        Empty at the end of the member. Raises InvalidTreeError when the stream is cut short.
        """
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._stream.read(wanted) if wanted else b""
        if wanted and not data:
            raise InvalidTreeError("the tar stream ends inside a member")
        self._left -= len(data)
        return data

    def jump(self, file: BinaryIO) -> None:
        """Pass over what is left without reading it. Raises InvalidTreeError when the file is shorter."""
        file.seek(max(0, self._left - 1), os.SEEK_CUR)
        self._left = min(self._left, 1)

    def skip(self) -> None:
        """Move to the next header."""
        while self.read(1 << 20):
            pass
        if exactly(self._stream, self._pad).strip(b"\0"):
            raise InvalidTreeError("the padding of a tar member is not zero")


def members(stream: Readable, *, cap: int = LIMITS.tree_members) -> Iterator[tuple[Member, Body]]:
    """Each member with its body, in order; the body is valid until the next step.

    Raises InvalidTreeError, UnsafePathError, UnsafeLinkError, UnsafeMemberError, DuplicateMemberError, or ArchiveBombError
    past `cap` members.
    """
    seen: dict[str, bool] = {}
    while (info := _next(stream)) is not None:
        member = _checked(info)
        _unique(seen, member)
        if len(seen) > cap:
            raise ArchiveBombError(f"more than {cap} members")
        body = Body(stream, member.size)
        yield member, body
        body.skip()


def exactly(stream: Readable, size: int) -> bytes:
    """`size` bytes. Raises InvalidTreeError when the stream ends before."""
    parts = []
    while size:
        part = stream.read(size)
        if not part:
            raise InvalidTreeError("the tar stream is cut short")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _next(stream: Readable) -> tarfile.TarInfo | None:
    pax: dict[str, str] = {}
    while True:
        block = exactly(stream, BLOCK)
        if not block.strip(b"\0"):
            _end(stream)
            return None
        info = _parse(block)
        if info.type != tarfile.XHDTYPE:
            return _apply(info, pax)
        if pax:
            raise InvalidTreeError("two pax headers before one member")
        pax = _pax(stream, info.size)


def _parse(block: bytes) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.TarError, ValueError) as error:
        raise InvalidTreeError(f"malformed tar header: {error}") from error
    if info.size < 0:
        raise InvalidTreeError("a tar member has a negative size")
    return info


def _end(stream: Readable) -> None:
    # Writers pad archives to 10240 bytes; anything else after the end would be hidden data.
    seen = 0
    while data := stream.read(BLOCK):
        seen += len(data)
        if data.strip(b"\0") or seen > 64 * BLOCK:
            raise InvalidTreeError("data after the end of the tar stream")


def _pax(stream: Readable, size: int) -> dict[str, str]:
    if size > LIMITS.pax_header:
        raise ArchiveBombError(f"a pax header of {size} bytes")
    data = exactly(stream, size)
    exactly(stream, -size % BLOCK)
    records: dict[str, str] = {}
    while data:
        name, value, data = _record(data)
        records[name] = value
    return records


def _record(data: bytes) -> tuple[str, str, bytes]:
    digits, separator, _ = data.partition(b" ")
    if (
        not separator
        or not digits.isdigit()
        or len(digits) > 6
        or not len(digits) + 1 < int(digits) <= len(data)
    ):
        raise InvalidTreeError("malformed pax record")
    record, rest = data[len(digits) + 1 : int(digits)], data[int(digits) :]
    name, equals, value = record.partition(b"=")
    if not equals or not value.endswith(b"\n"):
        raise InvalidTreeError("malformed pax record")
    try:
        return name.decode(), value[:-1].decode(), rest
    except UnicodeDecodeError as error:
        raise InvalidTreeError("a pax record is not UTF-8") from error


def _apply(info: tarfile.TarInfo, pax: dict[str, str]) -> tarfile.TarInfo:
    if any(name.startswith("GNU.sparse") for name in pax):
        raise UnsafeMemberError(f"{info.name!r} is a sparse file")
    info.name = pax.get("path", info.name)
    size = pax.get("size", str(info.size))
    if not size.isdecimal() or not size.isascii() or len(size) > 18:
        raise InvalidTreeError(f"{info.name!r} has the size {size!r}")
    info.size = int(size)
    return info


def _checked(info: tarfile.TarInfo) -> Member:
    if info.type in _LINKS:
        raise UnsafeLinkError(f"{info.name!r} is a link")
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        raise UnsafeMemberError(f"{info.name!r} is of the special type {info.type!r}")
    is_directory = info.type == tarfile.DIRTYPE
    name = info.name.removesuffix("/") if is_directory else info.name
    check_name(name)
    return Member(name, 0 if is_directory else info.size, is_directory, bool(info.mode & 0o100))


def check_name(name: str) -> None:
    """Raises UnsafePathError unless `name` is relative, plain and portable."""
    parts = name.split("/")
    if not name or len(name) > LIMITS.path or name.startswith("/") or not {"", ".", ".."}.isdisjoint(parts):
        raise UnsafePathError(f"{name[:200]!r} is not a plain relative path")
    if not name.isprintable() or "\\" in name or ":" in parts[0][1:2]:
        raise UnsafePathError(f"{name[:200]!r} has characters that no portable path has")
    if max(len(part.encode("utf-8", "surrogatepass")) for part in parts) > 255:
        raise UnsafePathError(f"{name[:200]!r} has a component of more than 255 bytes")


def _unique(seen: dict[str, bool], member: Member) -> None:
    if member.name in seen:
        raise DuplicateMemberError(f"{member.name!r} appears twice")
    for parent in PurePosixPath(member.name).parents:
        if seen.get(str(parent)) is False:
            raise UnsafePathError(f"{member.name!r} lies below a file")
    seen[member.name] = member.is_directory


def copy(source: Readable, target: BinaryIO) -> int:
    """Copy to the end; the number of bytes."""
    copied = 0
    while data := source.read(1 << 20):
        target.write(data)
        copied += len(data)
    return copied
