"""Make cubin-shaped ELF files by hand: the text of a kernel is the name of the routine that it runs."""

import struct
from collections.abc import Mapping, Sequence

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
Layout = Sequence[tuple[int, int]]


def info(layout: Layout) -> bytes:
    """A .nv.info section: one unrelated attribute, then one KPARAM_INFO per parameter."""
    data = struct.pack("<BBHI", 4, 0x2F, 4, 7) + struct.pack("<BBH", 3, 0x1B, 0xFF)
    for ordinal, (offset, size) in enumerate(layout):
        data += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, offset, size << 18 | 0x1F000)
    return data


def cubin(
    kernels: Mapping[str, tuple[str, Layout]], *, globals_: Sequence[str] = (), salt: str = ""
) -> bytes:
    """`kernels` maps mangled name to (routine, layout); `globals_` become writable data symbols."""
    parts: list[tuple[str, int, int, int, bytes]] = [("", 0, 0, 0, b"")]
    for name, (body, layout) in kernels.items():
        parts.append((f".text.{name}", 1, 6, 0, body.encode()))
        parts.append((f".nv.info.{name}", 0x70000000, 0, 0, info(layout)))
    parts.append((".nv.global", 8, 3, 0, b""))
    data_index = len(parts) - 1
    names = b"\0" + b"".join(g.encode() + b"\0" for g in globals_)
    parts.append((".strtab", 3, 0, 0, names))
    parts.append((".symtab", 2, 0, len(parts) - 1, _symbols(globals_, data_index)))
    parts.append((".note.salt", 7, 0, 0, salt.encode()))
    return _assemble(parts)


def _symbols(names: Sequence[str], section: int) -> bytes:
    at, out = 1, b"\0" * 24
    for number, name in enumerate(names):
        out += struct.pack("<IBBHQQ", at, 1 << 4 | 1, 0, section, number * 8, 8)
        at += len(name) + 1
    return out


def _assemble(parts: list[tuple[str, int, int, int, bytes]]) -> bytes:
    strings, offsets = b"\0", []
    parts = [*parts, (".shstrtab", 3, 0, 0, b"")]
    for name, *_ in parts:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"
    parts[-1] = (*parts[-1][:4], strings)
    body, rows = b"", b""
    for at, (_, kind, flags, link, data) in zip(offsets, parts, strict=True):
        rows += _SECTION.pack(at, kind, flags, 0, _HEADER.size + len(body), len(data), link, 0, 8, 0)
        body += data.ljust(-(-len(data) // 8) * 8, b"\0")
    magic, start = b"\x7fELF\x02\x01\x01".ljust(16, b"\0"), _HEADER.size + len(body)
    counts = (len(parts), len(parts) - 1)
    return _HEADER.pack(magic, 2, 190, 1, 0, 0, start, 0, 64, 56, 0, 64, *counts) + body + rows
