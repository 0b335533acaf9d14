"""Pack a directory into one tar.zst, and unpack it.

Equal trees produce equal bytes (sorted names, no times, no owners). Python's `tarfile` reads and writes the headers. This
module limits the size and content of an archive, because `inspect` and `validate` also read the trees of untrusted
bundles. Extraction is atomic: the directory appears only after the digest of the blob was verified.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tarfile import TarInfo
from typing import IO, BinaryIO, NamedTuple, Protocol, cast
from uuid import uuid4

import zstandard
from coldstart.artifacts import files
from coldstart.artifacts.blobs import VerifiedReader
from coldstart.artifacts.errors import (
    ArchiveBombError,
    BundleError,
    DestinationExistsError,
    DuplicateMemberError,
    InvalidTreeError,
    UnsafeLinkError,
    UnsafeMemberError,
    UnsafePathError,
    translate_os_errors,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci import Descriptor

TAR_END = b"\0" * (2 * tarfile.BLOCKSIZE)
_LEVEL, _WINDOW = 10, 1 << 27
MALFORMED_TAR_ERRORS = (tarfile.TarError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError)
"""Errors that `tarfile` raises for a malformed header."""


class Readable(Protocol):
    """Object with a binary `read` method."""

    def read(self, size: int = -1, /) -> bytes: ...


class TarMember(NamedTuple):
    """File or directory in a tree, with its size in bytes."""

    name: str
    size: int
    is_directory: bool


def build_tar_header(
    name: str, size: int = 0, *, is_directory: bool = False, executable: bool = False
) -> TarInfo:
    """Return a tar header without times, owner and user name. `size` is in bytes."""
    info = TarInfo(name)
    info.size = size
    info.type = tarfile.DIRTYPE if is_directory else tarfile.REGTYPE
    info.mode = 0o755 if is_directory or executable else 0o644
    return info


def open_tar_writer(sink: object) -> tarfile.TarFile:
    """Return a tar writer. The caller writes `TAR_END` to `sink` instead of calling `close`, which would pad the archive."""
    file = cast("IO[bytes]", sink)
    return tarfile.TarFile(
        fileobj=file, mode="w", format=tarfile.PAX_FORMAT, errors="strict", copybufsize=1 << 20
    )


def pack_tree(directory: Path, sink: BinaryIO) -> None:
    """Write `directory` to `sink` as tar.zst.

    Raises UnsafeLinkError, UnsafeMemberError, UnsafePathError, or InvalidTreeError if a file changes while it is read.
    """
    if not directory.is_dir():
        raise InvalidTreeError(f"{directory.name} is not a directory", hint="specify an existing directory")
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    with compressor.stream_writer(sink, closefd=False) as writer:
        archive = open_tar_writer(writer)
        for name in sorted(_walk_names(directory, "")):
            _add_member(archive, directory / name, name)
            archive.members.clear()  # type: ignore[attr-defined]  # Each header would remain in memory.
        writer.write(TAR_END)


def _walk_names(directory: Path, prefix: str) -> Iterator[str]:
    """Yield the relative path of each entry below `directory`, preceded by `prefix`."""
    for entry in os.scandir(directory):
        name = prefix + entry.name
        _check_name(name)
        yield name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk_names(Path(entry.path), f"{name}/")


def _add_member(archive: tarfile.TarFile, path: Path, name: str) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UnsafeLinkError(f"cannot pack symbolic link {name}", hint="replace the link with its target")
    if stat.S_ISDIR(status.st_mode):
        archive.addfile(build_tar_header(name, is_directory=True))
        return
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeMemberError(
            f"cannot pack {name}: it is neither a file nor a directory",
            hint=f"remove {name} from the directory",
        )
    info = build_tar_header(name, status.st_size, executable=bool(status.st_mode & 0o100))
    try:
        with files.open_regular(path) as file:
            archive.addfile(info, file)
    except OSError as error:
        if error.errno is not None:
            raise
        raise InvalidTreeError(
            f"cannot pack {name}: the file shrank while it was read",
            hint="stop the programs that write to the file, then try again",
        ) from error


class _BoundedReader:
    """Forward-only stream for `tarfile` that raises ArchiveBombError after `budget` bytes or at an oversized header."""

    def __init__(self, source: Readable, budget: int) -> None:
        self._source, self._left, self._at, self.block = source, budget, 0, b""

    def read(self, size: int) -> bytes:
        if size > LIMITS.pax_header_bytes:
            raise ArchiveBombError(f"a tar header of the section exceeds {LIMITS.pax_header_bytes} bytes")
        self.block = data = self._source.read(min(size, self._left + 1))
        self._left -= len(data)
        self._at += len(data)
        if self._left < 0:
            raise ArchiveBombError(f"the unpacked section exceeds the size limit of {self._at - 1} bytes")
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, position: int) -> None:
        if position < self._at:
            raise InvalidTreeError("a tar header of the section has a negative size")
        for _ in self.read_body(position - self._at):
            pass

    def read_body(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes. Raises InvalidTreeError if the stream is shorter."""
        while size:
            if not (data := self.read(min(LIMITS.pax_header_bytes, size))):
                raise InvalidTreeError("the tar stream of the section ends in the middle of a file")
            size -= len(data)
            yield data


def extract_tree(reader: VerifiedReader, entry: Descriptor, dest: Path) -> int:
    """Unpack a tree into the new directory `dest` and return the number of files and directories.

    Raises DestinationExistsError, DigestMismatchError, ArchiveBombError, InvalidTreeError, UnsafePathError,
    UnsafeLinkError, UnsafeMemberError, DuplicateMemberError, NoSpaceError, ReadOnlyStoreError.
    """
    if os.path.lexists(dest):
        raise DestinationExistsError(f"{dest.name} already exists")
    partial = dest.with_name(f".{dest.name}.{uuid4().hex}.partial")
    with translate_os_errors(f"extracting {entry.section_type}"):
        partial.mkdir(parents=True)
        try:
            members = read_tree(reader, entry, partial)
            partial.rename(dest)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return len(members)


def read_tree(reader: VerifiedReader, entry: Descriptor, target: Path | None = None) -> list[TarMember]:
    """Read a tree to its end, and return its members. If `target` is set, write them below it.

    Raises the errors of `extract_tree`.
    """
    budget = min(LIMITS.tree_bytes, max(LIMITS.ratio_floor_bytes, LIMITS.tree_ratio * entry.size))
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    stream = decompressor.stream_reader(cast("IO[bytes]", reader), read_across_frames=True, closefd=False)
    try:
        return read_tar(stream, budget, target)
    except zstandard.ZstdError as error:
        raise InvalidTreeError(f"cannot decompress the section: {error}") from error
    finally:
        # A damaged blob raises DigestMismatchError here, which replaces the error of the malformed stream.
        reader.drain()


def read_tar(source: Readable, budget: int, target: Path | None = None) -> list[TarMember]:
    """Read a tar stream of at most `budget` bytes and return its members. If `target` is set, write them below it.

    Raises InvalidTreeError, UnsafePathError, UnsafeLinkError, UnsafeMemberError, DuplicateMemberError, ArchiveBombError.
    """
    stream, members = _BoundedReader(source, budget), list[TarMember]()
    for info in _iterate_members(stream):
        members.append(TarMember(info.name, info.size, info.isdir()))
        if target is None:
            continue
        if info.isdir():
            (target / info.name).mkdir()
            continue
        with files.create_file(target / info.name, 0o755 if info.mode & 0o100 else 0o644) as file:
            for data in stream.read_body(info.size):
                file.write(data)
    return members


def _iterate_members(stream: _BoundedReader) -> Iterator[TarInfo]:
    """Yield each header in order. A directory comes before its entries, so names cannot conflict."""
    is_directory, length, end = {"": True}, 0, 0
    try:
        archive = tarfile.TarFile(fileobj=cast("IO[bytes]", stream), encoding="utf-8", errors="strict")
        while (info := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # Each header would remain in memory.
            if info.offset != end:  # `next` skips a damaged header silently.
                break
            end = archive.offset
            _check_header(info)
            if info.name in is_directory:
                raise DuplicateMemberError(f"the section contains {info.name!r} twice")
            if not is_directory.get(info.name.rpartition("/")[0]):
                raise UnsafePathError(f"{info.name[:200]!r} has no parent directory in the section")
            is_directory[info.name] = info.isdir()
            length += len(info.name) + info.offset_data - info.offset - tarfile.BLOCKSIZE
            if len(is_directory) > LIMITS.tree_members + 1:
                raise ArchiveBombError(f"the section has more than {LIMITS.tree_members} entries")
            if length > LIMITS.tree_names_bytes:
                raise ArchiveBombError(f"file names in the section exceed {LIMITS.tree_names_bytes} bytes")
            yield info
    except BundleError:
        raise
    except MALFORMED_TAR_ERRORS as error:
        raise InvalidTreeError(f"cannot parse the tar stream of the section: {error}") from error
    if not stream.block or stream.block.strip(b"\0") or stream.tell() - len(stream.block) != end:
        raise InvalidTreeError("the tar stream of the section is damaged or truncated")


def _check_header(info: TarInfo) -> None:
    if info.issym() or info.islnk():
        raise UnsafeLinkError(f"{info.name[:200]!r} is a link, which a section must not contain")
    is_sparse = info.sparse is not None or any(name.startswith("GNU.sparse") for name in info.pax_headers)
    if is_sparse or not (info.isdir() or info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)):
        raise UnsafeMemberError(f"{info.name[:200]!r} is a special file, which a section must not contain")
    if info.size < 0 or (info.isdir() and info.size):
        raise InvalidTreeError(f"{info.name[:200]!r} has an invalid size of {info.size} bytes")
    _check_name(info.name)


def _check_name(name: str) -> None:
    """Raise UnsafePathError unless `name` is a short relative path without special components."""
    parts = name.split("/") if len(name) <= LIMITS.path_characters else []
    if not 0 < len(parts) <= LIMITS.path_depth or max(len(part.encode()) for part in parts) > 255:
        raise UnsafePathError(f"path {name[:200]!r} is too long or has more than {LIMITS.path_depth} parts")
    if not {"", ".", ".."}.isdisjoint(parts) or not name.isprintable():
        raise UnsafePathError(f"{name[:200]!r} is not a plain relative path")
