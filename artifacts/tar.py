"""Subset of tar for bundles: regular files and directories with safe relative names, each once.

Headers are ustar, with pax records for long names and sizes. Links, devices, FIFOs and sparse files are errors.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, Protocol

from coldstart.artifacts.errors import (
    ArchiveBombError,
    InvalidTreeError,
    UnsafeLinkError,
    UnsafeMemberError,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.member_names import MemberNames, check_name

BLOCK = tarfile.BLOCKSIZE
END = b"\0" * (2 * BLOCK)
_LINKS = frozenset({tarfile.LNKTYPE, tarfile.SYMTYPE})
_USTAR = frozenset(
    {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, *_LINKS}
)  # Types whose names have a prefix.


class Readable(Protocol):
    """Object with a binary read."""

    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Member:
    """Entry of the archive: `size` in bytes (0 for a directory)."""

    name: str
    size: int
    is_directory: bool = False
    executable: bool = False


def header(member: Member) -> bytes:
    """Return deterministic header bytes, without times, owners or user names."""
    info = tarfile.TarInfo(member.name)
    info.size = member.size
    info.type = tarfile.DIRTYPE if member.is_directory else tarfile.REGTYPE
    info.mode = 0o755 if member.is_directory or member.executable else 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padding(size: int) -> bytes:
    """Return the zeros that fill the last block of a member of `size` bytes."""
    return b"\0" * (-size % BLOCK)


class Body:
    """Bytes of the current member; unread bytes are skipped."""

    def __init__(self, stream: Readable, size: int) -> None:
        self._stream, self._left = stream, size
        self._pad = -size % BLOCK

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes; b"" at the end of the member. Raises InvalidTreeError for a truncated stream."""
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._stream.read(wanted) if wanted else b""
        if wanted and not data:
            raise InvalidTreeError("the tar stream ends inside a member")
        self._left -= len(data)
        return data

    def jump(self, file: BinaryIO) -> None:
        """Skip the remaining bytes without reading them. Raises InvalidTreeError for a truncated file."""
        file.seek(max(0, self._left - 1), os.SEEK_CUR)
        self._left = min(self._left, 1)

    def skip(self) -> None:
        """Move to the next header."""
        while self._left:
            self.read(1 << 20)
        if self._pad and exactly(self._stream, self._pad).strip(b"\0"):
            raise InvalidTreeError("the padding of a tar member is not zero")


def members(stream: Readable, *, cap: int = LIMITS.tree_members) -> Iterator[tuple[Member, Body]]:
    """Yield each member with its body, in order; the body is valid until the next step.

    Raises InvalidTreeError, UnsafePathError, UnsafeLinkError, UnsafeMemberError, DuplicateMemberError, or
    ArchiveBombError above `cap` members.
    """
    names = MemberNames(cap)
    while (found := _next(stream)) is not None:
        member = _checked(found[0])
        names.add(member.name, is_directory=member.is_directory, header_bytes=found[1])
        body = Body(stream, member.size)
        yield member, body
        body.skip()


def exactly(stream: Readable, size: int) -> bytes:
    """Return `size` bytes. Raises InvalidTreeError if the stream ends before."""
    parts = []
    while size:
        part = stream.read(size)
        if not part:
            raise InvalidTreeError("the tar stream is cut short")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _Header(NamedTuple):
    name: str
    size: int
    kind: bytes
    executable: bool


def _next(stream: Readable) -> tuple[_Header, int] | None:
    """Return the next member's header and the size of its pax header; None at the end."""
    block = exactly(stream, BLOCK)
    if not block.strip(b"\0"):
        _end(stream)
        return None
    header = _parse(block)
    if header.kind != tarfile.XHDTYPE:
        return header, 0
    pax = _pax(stream, header.size)
    member = _parse(exactly(stream, BLOCK))
    if member.kind == tarfile.XHDTYPE:
        raise InvalidTreeError("two pax headers before one member")
    return _apply(member, pax), header.size


def _parse(block: bytes) -> _Header:
    """Parse a ustar header: of its fields only name, size, type, mode and checksum count."""
    if _number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        raise InvalidTreeError("a tar header has a wrong checksum")
    kind, name, prefix = block[156:157], _text(block[:100]), _text(block[345:500])
    if prefix and kind in _USTAR:
        name = f"{prefix}/{name}"
    if kind == tarfile.AREGTYPE and name.endswith("/"):
        kind = tarfile.DIRTYPE
    return _Header(name, _number(block[124:136]), kind, bool(_number(block[100:108]) & 0o100))


def _text(field: bytes) -> str:
    try:
        return field.partition(b"\0")[0].decode()
    except UnicodeDecodeError as error:
        raise InvalidTreeError("a name in a tar header is not UTF-8") from error


def _number(field: bytes) -> int:
    """Parse an octal field, or one in base 256, which GNU tar writes for large sizes."""
    if field[0] == 0x80 and not any(field[1:-7]):
        return int.from_bytes(field[-7:], "big")
    digits = field.partition(b"\0")[0].strip()
    if digits.strip(b"01234567"):
        raise InvalidTreeError("a tar header has a field that is not a number")
    return int(digits or b"0", 8)


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
    for _ in range(LIMITS.pax_records + 1):
        if not data:
            return records
        name, value, data = _record(data)
        records[name] = value
    raise ArchiveBombError(f"a pax header of more than {LIMITS.pax_records} records")


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


def _apply(header: _Header, pax: dict[str, str]) -> _Header:
    if any(name.startswith("GNU.sparse") for name in pax):
        raise UnsafeMemberError(f"{header.name!r} is a sparse file")
    name = pax.get("path", header.name)
    size = pax.get("size", str(header.size))
    if not size.isdecimal() or not size.isascii() or len(size) > 18:
        raise InvalidTreeError(f"{name[:200]!r} has the size {size!r}")
    return header._replace(name=name, size=int(size))


def _checked(header: _Header) -> Member:
    if header.kind in _LINKS:
        raise UnsafeLinkError(f"{header.name[:200]!r} is a link")
    if header.kind not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        raise UnsafeMemberError(f"{header.name[:200]!r} is of the special type {header.kind!r}")
    is_directory = header.kind == tarfile.DIRTYPE
    name = header.name.removesuffix("/") if is_directory else header.name
    check_name(name)
    return Member(name, 0 if is_directory else header.size, is_directory, header.executable)


def copy(source: Readable, target: BinaryIO) -> int:
    """Copy to the end and return the number of bytes."""
    copied = 0
    while data := source.read(1 << 20):
        target.write(data)
        copied += len(data)
    return copied
