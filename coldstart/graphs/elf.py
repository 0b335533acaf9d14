"""Read a cubin without a GPU: kernel names, exact parameter layout and module globals.

A cubin is an ELF64 file.  Kernels are the .text.<name> sections; .nv.info.<name> is a list of attributes
(format byte, attribute byte, 16-bit value or size, data); attribute 0x17 (KPARAM_INFO) describes one
parameter: u32 index, u16 ordinal, u16 offset, u32 flags whose bits 18.. are the size in bytes.  A kernel with
a parameter of 16 KiB or more has attribute 0x45 instead, whose last word is the size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap

from coldstart.graphs.errors import AlteredTableError

Buffer = bytes | mmap
KPARAM_INFO, KPARAM_INFO_V2 = 0x17, 0x45
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_WRITE, _SYMTAB, _NOBITS, _OBJECT = 1, 2, 8, 1


@dataclass(frozen=True)
class Section:
    """One ELF section and its bytes (empty for .bss-like ones)."""

    name: str
    type: int
    flags: int
    link: int
    data: bytes


@dataclass(frozen=True)
class Cubin:
    """`kernels` maps mangled name to ((offset, size), ...); the rest are variables that launches share."""

    kernels: dict[str, tuple[tuple[int, int], ...]]
    mutable_globals: tuple[str, ...]


def read_cubin(image: bytes) -> Cubin:
    """Parse one cubin. Raises AlteredTableError where it is not a whole ELF64 little-endian file."""
    try:
        section_list = sections(image)
        infos = {s.name[9:]: parameters(s.data) for s in section_list if s.name.startswith(".nv.info.")}
        names = [s.name[6:] for s in section_list if s.name.startswith(".text.")]
        return Cubin({n: infos.get(n, ()) for n in names}, _globals(section_list))
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise AlteredTableError(f"kernel binary is not a whole cubin: {error}") from error


def sections(image: Buffer) -> list[Section]:
    """All sections in order. Raises ValueError or struct.error where the file is not whole."""
    return [Section(name, r[1], r[2], r[6], _body(image, r)) for name, r in _rows(image)]


def spans(image: Buffer) -> list[tuple[str, int, int]]:
    """(name, offset, bytes) of all sections, nothing copied. Raises ValueError or struct.error."""
    return [(name, row[4], row[5]) for name, row in _rows(image)]


def _rows(image: Buffer) -> list[tuple[str, tuple[int, ...]]]:
    head = _HEADER.unpack_from(image)
    if head[0][:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF header")
    start, count, names = head[6], head[12], head[13]
    rows = [_SECTION.unpack_from(image, start + i * _SECTION.size) for i in range(count)]
    strings = _body(image, rows[names])
    return [(_string(strings, row[0]), row) for row in rows]


def _body(image: Buffer, row: tuple[int, ...]) -> bytes:
    if row[1] in (0, 8):
        return b""
    if row[4] + row[5] > len(image):
        raise ValueError("a section ends outside the file")
    return image[row[4] : row[4] + row[5]]


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def parameters(info: bytes) -> tuple[tuple[int, int], ...]:
    """((offset, size), ...) by ordinal, from the bytes of one .nv.info.<kernel> section."""
    by_ordinal: dict[int, tuple[int, int]] = {}
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:
            continue
        if attribute in (KPARAM_INFO, KPARAM_INFO_V2):
            _, ordinal, offset, word = struct.unpack_from("<IHHI", info, at)
            by_ordinal[ordinal] = (offset, word >> 18 if attribute == KPARAM_INFO else word & 0xFFFF)
        at += value
    return tuple(by_ordinal[i] for i in sorted(by_ordinal))


def _globals(section_list: list[Section]) -> tuple[str, ...]:
    """Variables of more than a byte that the file gives no contents: state that launches share.

    Writable sections also hold what no kernel writes: function objects of the C++ library, of one byte each, and,
    with their contents in the file, texts and tables.  A variable with a first value looks like a table: the
    proof judges that one.
    """
    names: set[str] = set()
    for table in (s for s in section_list if s.type == _SYMTAB):
        strings = section_list[table.link].data
        for at in range(0, len(table.data), _SYMBOL.size):
            name, info, _, index, _, size = _SYMBOL.unpack_from(table.data, at)
            if (
                info & 0xF == _OBJECT
                and size > 1
                and index < len(section_list)
                and _state(section_list[index])
            ):
                names.add(_string(strings, name))
    return tuple(sorted(names))


def _state(section: Section) -> bool:
    """Whether a section is uninitialised global memory; a block's shared memory is no state."""
    shared = section.name.startswith(".nv.shared")
    return section.type == _NOBITS and bool(section.flags & _WRITE) and not shared
