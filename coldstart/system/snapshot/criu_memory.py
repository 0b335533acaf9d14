"""Memory of a frozen process, moved out of CRIU's pages into a file that the thawed process maps.

CRIU reads every page that it has kept into each process that it thaws, and the processes share none of them. What is not
written to again, a model's weights above all, is had for less: anonymous memory at least RUN bytes long becomes a private
mapping of MEMORY, whose pages come from the page cache when they are touched, one copy for all. A write copies the page, as
CRIU's own mapping of a library's data does. Only the description of the frozen process changes; it never runs meanwhile.

Formats: CRIU's protobuf images `mm`, `pagemap` and `files` (criu/images/*.proto), each a magic of eight bytes and messages with
their length before them. Fields that are not named here are left as they are.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

MEMORY = "memory.img"
RUN = 1 << 18
"""Shorter runs are left to CRIU: each costs a mapping. A start writes to a fifth of Python's arenas of small objects, which
are longer."""

_PAGE = 4096
_MAGIC = 8
# vma.proto: VmaEntry; mm.proto: the field of mm_entry that holds them.
_START, _END, _OFFSET, _FILE, _PROTECTION, _FLAGS, _STATUS, _ADVICE, _OPENED = 1, 2, 3, 4, 5, 6, 7, 9, 10
_VMAS = 14
_REGULAR, _FILE_PRIVATE, _ANON_PRIVATE = 1 << 0, 1 << 6, 1 << 9
_MAP_ANONYMOUS, _MAP_GROWSDOWN, _MAP_HUGETLB = 0x20, 0x100, 0x40000
_READ_WRITE = 3
# pagemap.proto: pagemap_entry.
_ADDRESS, _COUNT_32, _IN_PARENT, _COUNT = 1, 2, 3, 5
# fdinfo.proto: file_entry; regfile.proto: reg_file_entry.
_TYPE, _ID, _REG = 1, 2, 3
_REG_ID, _REG_FLAGS, _REG_POSITION, _REG_OWNER, _REG_NAME, _REG_SIZE = 1, 2, 3, 5, 6, 8
_REG_TYPE = 1

Field = tuple[int, int | bytes]
Message = list[Field]


class UnknownImageError(ValueError):
    """The images are not as they are known here; they were left as they are."""


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` pages at `address`, kept in the pages file from `kept`; `vma` is the mapping that holds them."""

    address: int
    count: int
    kept: int
    vma: int

    @property
    def end(self) -> int:
        return self.address + self.count * _PAGE


def move(images: Path, mapped: Path) -> int:
    """Move the large anonymous memory of the one process in `images` into MEMORY beside them; the bytes moved.

    `mapped` is the path by which the thawed process will find MEMORY. Raises Unknown before anything is changed, OSError.
    """
    mm, pagemap, pages = _only(images, "mm-*"), _only(images, "pagemap-*"), _only(images, "pages-*")
    files = images / "files.img"
    space, opened = _read(mm)[0], _read(files)
    head, *entries = _read(pagemap)
    vmas = [_message(value) for number, value in space if number == _VMAS and isinstance(value, bytes)]
    runs = list(_runs(entries, [(_number(vma, _START), _number(vma, _END)) for vma in vmas]))
    if runs and runs[-1][1].kept + runs[-1][1].count * _PAGE != pages.stat().st_size:
        raise UnknownImageError(f"{pages.name} does not hold the pages that {pagemap.name} tells of")
    filed: list[_Run] = []
    rest: list[tuple[Message, _Run]] = []
    for group in _joined(runs):
        whole = replace(group[0][1], count=sum(run.count for _, run in group))
        if whole.count * _PAGE >= RUN and _plain(vmas[whole.vma]):
            filed.append(whole)
        else:
            rest += group
    if not filed:
        return 0
    offsets, size = dict[int, int](), 0
    for run in filed:
        offsets[run.address], size = size, size + run.count * _PAGE
    identity = 1 + max(_number(entry, _ID) for entry in opened)
    _copy(pages, images / MEMORY, filed)
    _copy(pages, images / f"{pages.name}.part", [run for _, run in rest])
    (images / f"{pages.name}.part").replace(pages)
    _write(pagemap, [head, *(_entry(entry, run) for entry, run in rest)])
    _write(mm, [_remapped(space, vmas, filed, offsets, identity)])
    _write(files, [*opened, _file(opened, identity, mapped, size)])
    return size


def _runs(entries: Iterable[Message], spans: list[tuple[int, int]]) -> Iterator[tuple[Message, _Run]]:
    """Each pagemap entry with its run of pages, cut where mappings meet."""
    starts, kept = [start for start, _ in spans], 0
    for entry in entries:
        if any(number == _IN_PARENT and value for number, value in entry):
            raise UnknownImageError("the image leans on an earlier one")
        address = _number(entry, _ADDRESS)
        count = next((v for n, v in entry if n == _COUNT and isinstance(v, int)), _number(entry, _COUNT_32))
        while count:
            vma = bisect(starts, address) - 1
            here = min(count, (spans[vma][1] - address) // _PAGE) if vma >= 0 else 0
            if here <= 0:
                raise UnknownImageError(f"no mapping holds the page at {address:#x}")
            yield entry, _Run(address, here, kept, vma)
            address, count, kept = address + here * _PAGE, count - here, kept + here * _PAGE


def _joined(runs: Iterable[tuple[Message, _Run]]) -> Iterator[list[tuple[Message, _Run]]]:
    """The runs in groups without a gap in one mapping: CRIU cuts them where its pipes were full."""
    group: list[tuple[Message, _Run]] = []
    for entry, run in runs:
        if group and (run.address != group[-1][1].end or run.vma != group[-1][1].vma):
            yield group
            group = []
        group.append((entry, run))
    if group:
        yield group


def _plain(vma: Message) -> bool:
    """Whether a mapping is ordinary private memory, readable and writable, that does not grow downwards.

    One that was given advice is not: some (to be wiped in a child, say) is refused for a file.
    """
    flags = _number(vma, _FLAGS)
    return (
        bool(_number(vma, _STATUS) & _ANON_PRIVATE)
        and _number(vma, _PROTECTION) == _READ_WRITE
        and bool(flags & _MAP_ANONYMOUS)
        and not flags & (_MAP_GROWSDOWN | _MAP_HUGETLB)
        and not any(value for number, value in vma if number == _ADVICE)
    )


def _remapped(
    space: Message, vmas: list[Message], filed: list[_Run], offsets: dict[int, int], identity: int
) -> Message:
    """The address space with a mapping of the file in place of each of `filed`."""
    by_vma: dict[int, list[_Run]] = {}
    for run in filed:
        by_vma.setdefault(run.vma, []).append(run)
    cut: list[bytes] = []
    for number, vma in enumerate(vmas):
        here, end = _number(vma, _START), _number(vma, _END)
        for run in by_vma.get(number, ()):
            if here < run.address:
                cut.append(_encoded(_with(vma, {_START: here, _END: run.address})))
            status = _REGULAR | _FILE_PRIVATE
            flags = _number(vma, _FLAGS) & ~_MAP_ANONYMOUS
            place = {_START: run.address, _END: run.end, _OFFSET: offsets[run.address], _FILE: identity}
            cut.append(_encoded(_with(vma, place | {_FLAGS: flags, _STATUS: status, _OPENED: os.O_RDONLY})))
            here = run.end
        if here < end:
            cut.append(_encoded(_with(vma, {_START: here, _END: end})))
    first = next(at for at, (number, _) in enumerate(space) if number == _VMAS)
    others = [field for field in space if field[0] != _VMAS]
    return [*others[:first], *((_VMAS, vma) for vma in cut), *others[first:]]


def _entry(entry: Message, run: _Run) -> Message:
    return _with(entry, {_ADDRESS: run.address, _COUNT_32: 0, _COUNT: run.count})


def _file(opened: list[Message], identity: int, mapped: Path, size: int) -> Message:
    """The description of a file that is open for reading; whose it is (nobody's signals) as of any other."""
    regular = next((v for entry in opened for n, v in entry if n == _REG and isinstance(v, bytes)), None)
    if regular is None:
        raise UnknownImageError("the process has no file mapped")
    owner = next(value for number, value in _message(regular) if number == _REG_OWNER)
    described: Message = [
        (_REG_ID, identity),
        (_REG_FLAGS, os.O_RDONLY),
        (_REG_POSITION, 0),
        (_REG_OWNER, owner),
        (_REG_NAME, os.fsencode(mapped)),
        (_REG_SIZE, size),
    ]
    return [(_TYPE, _REG_TYPE), (_ID, identity), (_REG, _encoded(described))]


def _copy(source: Path, target: Path, runs: Iterable[_Run]) -> None:
    """The pages of `runs`, one after another, into `target`."""
    with source.open("rb") as pages, open(target, "wb", opener=_private) as out:
        for run in runs:
            place, left = run.kept, run.count * _PAGE
            while left:
                done = os.sendfile(out.fileno(), pages.fileno(), place, left)
                if not done:
                    raise OSError(f"{source} ends in the middle of a run of pages")
                place, left = place + done, left - done


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _only(images: Path, pattern: str) -> Path:
    found = list(images.glob(f"{pattern}.img"))
    if len(found) != 1:
        raise UnknownImageError(f"{len(found)} images {pattern}, not of one process")
    return found[0]


def _with(message: Message, changed: dict[int, int]) -> Message:
    """The message with these fields, in the order of their numbers."""
    kept = [(number, value) for number, value in message if number not in changed]
    return sorted([*kept, *changed.items()], key=lambda field: field[0])


def _number(message: Message, wanted: int) -> int:
    value = next((value for number, value in message if number == wanted), None)
    if not isinstance(value, int):
        raise UnknownImageError(f"a message has no number as its field {wanted}")
    return value


def _read(image: Path) -> list[Message]:
    data, messages, at = image.read_bytes(), [], _MAGIC
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        messages.append(_message(data[at + 4 : at + 4 + length]))
        at += 4 + length
    if at != len(data) or not messages:
        raise UnknownImageError(f"{image.name} is cut short")
    return messages


def _write(image: Path, messages: Iterable[Message]) -> None:
    magic = image.read_bytes()[:_MAGIC]
    encoded = [_encoded(message) for message in messages]
    image.write_bytes(magic + b"".join(struct.pack("<I", len(one)) + one for one in encoded))


def _message(data: bytes) -> Message:
    """The fields of a protobuf message that has numbers, texts and messages alone."""
    fields: Message = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
            fields.append((key >> 3, value))
        elif key & 7 == 2:
            length, at = _varint(data, at)
            fields.append((key >> 3, data[at : at + length]))
            at += length
        else:
            raise UnknownImageError(f"a field of wire type {key & 7}")
    return fields


def _encoded(message: Message) -> bytes:
    out = bytearray()
    for number, value in message:
        if isinstance(value, int):
            out += _bytes(number << 3) + _bytes(value)
        else:
            out += _bytes(number << 3 | 2) + _bytes(len(value)) + value
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise UnknownImageError("a message is cut short")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _bytes(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
