"""Read a cubin without a GPU: kernel names, exact parameter layouts and module globals.

A cubin is an ELF64 file. Section .text.<name> contains the code of a kernel. Section .nv.info.<name> is a list of its
attributes (format byte, attribute byte, 16-bit value or size, data). Attribute 0x17 (KPARAM_INFO) describes one
parameter: u32 index, u16 ordinal, u16 offset, u32 flags with the size in bytes from bit 18. A kernel with a parameter of
16 KiB or more has attribute 0x45 instead, whose last word is the size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from coldstart.graphs.errors import AlteredTableError

KPARAM_INFO, KPARAM_INFO_V2 = 0x17, 0x45
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_WRITE, _SYMTAB, _NOBITS, _OBJECT = 1, 2, 8, 1


@dataclass(frozen=True)
class Section:
    """ELF section with its data (empty for sections such as .bss) and the offset of its data in the file."""

    name: str
    type: int
    flags: int
    link: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Cubin:
    """Parsed cubin. `kernels` maps each mangled kernel name to the (offset, size) of its parameters in bytes.

    `mutable_globals` are the names of the global variables that all launches share.
    """

    kernels: dict[str, tuple[tuple[int, int], ...]]
    mutable_globals: tuple[str, ...]


def read_cubin(image: bytes) -> Cubin:
    """Parse a cubin. Raises AlteredTableError if it is not a complete little-endian ELF64 file."""
    try:
        section_list = sections(image)
        infos = {s.name[9:]: parameters(s.data) for s in section_list if s.name.startswith(".nv.info.")}
        names = [s.name[6:] for s in section_list if s.name.startswith(".text.")]
        return Cubin({n: infos.get(n, ()) for n in names}, _globals(section_list))
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise AlteredTableError(f"cannot parse the kernel binary as a cubin: {error}") from error


def sections(image: bytes) -> list[Section]:
    """Return all sections of an ELF file in order. Raises ValueError or struct.error if the file is truncated or not ELF."""
    head = _HEADER.unpack_from(image)
    if head[0][:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    start, count, names = head[6], head[12], head[13]
    rows = [_SECTION.unpack_from(image, start + i * _SECTION.size) for i in range(count)]
    strings = _body(image, rows[names])
    return [Section(_string(strings, r[0]), r[1], r[2], r[6], r[4], _body(image, r)) for r in rows]


def _body(image: bytes, row: tuple[int, ...]) -> bytes:
    if row[1] in (0, 8):
        return b""
    if row[4] + row[5] > len(image):
        raise ValueError("an ELF section extends beyond the end of the file")
    return image[row[4] : row[4] + row[5]]


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def parameters(info: bytes) -> tuple[tuple[int, int], ...]:
    """Return the (offset, size) of each kernel parameter in bytes. `info` is the data of a .nv.info.<kernel> section."""
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
    """Return the names of zero-initialized variables of more than one byte, which are state that launches share.

    Writable sections also contain data that no kernel writes: one-byte function objects of the C++ library, and
    initialized strings and tables. An initialized variable cannot be distinguished from a table, so verification has to
    detect it.
    """
    # Exclude the shared memory of blocks, which is not global state.
    state = {
        index
        for index, s in enumerate(section_list)
        if s.type == _NOBITS and s.flags & _WRITE and not s.name.startswith(".nv.shared")
    }
    names = {
        _string(section_list[table.link].data, name)
        for table in section_list
        if table.type == _SYMTAB
        for name, info, _, index, _, size in _SYMBOL.iter_unpack(table.data)
        if info & 0xF == _OBJECT and size > 1 and index in state
    }
    return tuple(sorted(names))
