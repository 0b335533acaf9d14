"""Kernels by reference: (library, build id, offset, size) of a cubin in a fat binary, packed or not.

Invariant: `fetch` returns bytes with the digest that the tables name, or raises. A kernel that no library
contains, because it was compiled on the machine, is bundled by value.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coldstart.graphs.elf import spans
from coldstart.graphs.errors import AlteredTableError, MissingKernelError
from coldstart.graphs.fatbin import library_entries, unpack
from coldstart.graphs.table_files import sha256

NOTE_BUILD_ID = ".note.gnu.build-id"


@dataclass(frozen=True)
class Reference:
    """Position of a cubin: `library` is a file name without directory; `size` counts its bytes as stored there."""

    library: str
    build_id: str
    offset: int
    size: int


def loaded_libraries() -> list[Path]:
    """Return the shared libraries that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(Path(p) for p in paths if ".so" in p and Path(p).is_file())


def build_id(path: Path) -> str:
    """Return the build id of a library in hexadecimal, or "" if it has none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            notes = [data[at : at + size] for name, at, size in spans(data) if name == NOTE_BUILD_ID]
        except (struct.error, ValueError, IndexError, UnicodeDecodeError):
            return ""
    return notes[0][16:].hex() if notes else ""


def refer(
    binaries: Mapping[str, bytes], libraries: Iterable[Path], architecture: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return references by digest, as JSON data, for the binaries that a library contains.

    With `architecture` (90, ...), only cubins of that generation are unpacked. Raises MissingKernelError if none
    can be unpacked here.
    """
    documents: dict[str, dict[str, Any]] = {}
    for path in libraries:
        if len(documents) == len(binaries):
            break
        mine = {d: place for d, place in _places(path, binaries, architecture).items() if d not in documents}
        identity = build_id(path) if mine else ""
        for digest, (at, size) in mine.items():
            documents[digest] = asdict(Reference(path.name, identity, at, size))
    return documents


def _places(
    path: Path, binaries: Mapping[str, bytes], architecture: int | None
) -> dict[str, tuple[int, int]]:
    """Return (offset, bytes) by digest for the binaries in this library."""
    located: dict[str, tuple[int, int]] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for entry in library_entries(data):
                if architecture is not None and entry.architecture // 10 != architecture // 10:
                    continue
                digest = sha256(unpack(data[entry.offset : entry.offset + entry.size]))
                if digest in binaries:
                    located.setdefault(digest, (entry.offset, entry.size))
        except AlteredTableError:
            return located
    return located


def fetch(digest: str, references: Mapping[str, Mapping[str, Any]], libraries: Iterable[Path]) -> bytes:
    """Return the binary, read from a library of this machine and verified. Raises MissingKernelError, AlteredTableError."""
    if digest not in references:
        raise MissingKernelError("its binary is neither bundled nor stored by reference")
    wanted = Reference(**references[digest])
    for path in libraries:
        if path.name == wanted.library and build_id(path) == wanted.build_id:
            with path.open("rb") as file:
                file.seek(wanted.offset)
                data = file.read(wanted.size)
            if sha256(image := unpack(data)) == digest:
                return image
    raise MissingKernelError(f"no library {wanted.library} with build id {wanted.build_id[:12]} is loaded")
