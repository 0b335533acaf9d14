"""Kernels by reference, not by value: (library, build id, offset, size), for who may not copy binaries.

Invariant: what `fetch` returns has the digest that the tables name, or MissingKernel is raised.  Only
binaries that lie uncompressed inside a shared library can be referred to; the others are left to the ladder's
lower rungs.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coldstart.graphs.elf import sections
from coldstart.graphs.errors import MissingKernel
from coldstart.graphs.store import sha256

NOTE_BUILD_ID = ".note.gnu.build-id"


@dataclass(frozen=True)
class Reference:
    """`library` is a file name without its directory; offset and size are bytes of the file."""

    library: str
    build_id: str
    offset: int
    size: int


def loaded_libraries() -> list[Path]:
    """Shared libraries that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(Path(p) for p in paths if ".so" in p and Path(p).is_file())


def build_id(path: Path) -> str:
    """Hex build id of a library, or "" where it has none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            notes = [s.data for s in sections(data) if s.name == NOTE_BUILD_ID]
        except (ValueError, IndexError, UnicodeDecodeError):
            return ""
    return notes[0][16:].hex() if notes else ""


def refer(binaries: Mapping[str, bytes], libraries: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """References by digest for the binaries that some library holds verbatim; JSON-ready."""
    found: dict[str, dict[str, Any]] = {}
    for path in libraries:
        open_digests = [digest for digest in binaries if digest not in found]
        if not open_digests:
            break
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            places = {digest: data.find(binaries[digest]) for digest in open_digests}
        mine = {digest: at for digest, at in places.items() if at >= 0}
        identity = build_id(path) if mine else ""
        for digest, at in mine.items():
            found[digest] = asdict(Reference(path.name, identity, at, len(binaries[digest])))
    return found


def fetch(digest: str, references: Mapping[str, Mapping[str, Any]], libraries: Iterable[Path]) -> bytes:
    """The binary, read from a library of this machine and verified. Raises MissingKernel."""
    if digest not in references:
        raise MissingKernel("its binary is neither bundled nor referred to")
    wanted = Reference(**references[digest])
    for path in libraries:
        if path.name == wanted.library and build_id(path) == wanted.build_id:
            with path.open("rb") as file:
                file.seek(wanted.offset)
                data = file.read(wanted.size)
            if sha256(data) == digest:
                return data
    raise MissingKernel(f"{wanted.library} with build id {wanted.build_id[:12]} is not on this machine")
