"""Move a checkpointed process's memory out of CRIU's pages into a file that restored processes map.

CRIU copies every saved page into each process that it restores, so these processes share no pages. Pages that are not
written again, mainly a model's weights, can be mapped instead. Each run of at least MIN_RUN_BYTES of anonymous memory
becomes a private mapping of MEMORY_FILE. Its pages come from the page cache on first access, one copy for all processes.
A write copies the page. Only the checkpoint image changes, and the process does not run meanwhile.

Formats: CRIU's images `mm`, `pagemap` and `files` (criu/images/*.proto): eight bytes of magic, then protobuf messages,
each preceded by its length. protobuf keeps fields that are not listed here unchanged.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from coldstart.artifacts.files import create_file

MEMORY_FILE = "memory.img"
MIN_RUN_BYTES = 1 << 18
"""CRIU keeps shorter runs, because each run costs a mapping. Python's arenas of small objects are longer than this, and a
start writes to a fifth of them."""

_PAGE = 4096
_MAGIC = 8
_REGULAR, _FILE_PRIVATE, _ANON_PRIVATE = 1 << 0, 1 << 6, 1 << 9
_MAP_ANONYMOUS, _MAP_GROWSDOWN, _MAP_HUGETLB = 0x20, 0x100, 0x40000
_READ_WRITE = 3
_REG_TYPE = 1
# Numbers of the fields that this module uses. The messages `vmas` and `reg` are those of the next lines. The owner of a file
# is copied as it is, and every other field is a number, but for the name.
_FIELDS: Mapping[str, Mapping[str, int]] = {
    "vmas": {"start": 1, "end": 2, "pgoff": 3, "shmid": 4, "prot": 5, "flags": 6, "status": 7, "madv": 9, "fdflags": 10},
    "reg": {"id": 1, "flags": 2, "pos": 3, "fown": 5, "name": 6, "size": 8},
    "mm": {"vmas": 14},
    "pagemap_head": {"pages_id": 1},
    "pagemap": {"vaddr": 1, "compat_nr_pages": 2, "in_parent": 3, "nr_pages": 5},
    "file": {"type": 1, "id": 2, "reg": 3},
}  # fmt: skip
_OPTIONAL = frozenset({"madv", "fdflags", "size", "compat_nr_pages", "in_parent", "nr_pages", "reg"})


class UnknownImageError(ValueError):
    """Error for images in an unknown format. The images were not changed."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Run of `count` pages at `address`, stored at `offset` of the pages file, in the mapping with index `vma`."""

    address: int
    count: int
    offset: int
    vma: int

    @property
    def end(self) -> int:
        return self.address + self.count * _PAGE


def move_memory(images: Path, mapped: Path) -> int:
    """Move the large anonymous memory of the only process in `images` to MEMORY_FILE and return the bytes moved.

    Args:
        images: Directory of CRIU's images.
        mapped: Path at which the restored process will find MEMORY_FILE.

    Raises:
        UnknownImageError: The images have an unknown format; nothing was changed.
        OSError: A file cannot be read or written.
    """
    mm, pagemap, pages = (_find_single_image(images, f"{kind}-*") for kind in ("mm", "pagemap", "pages"))
    files = images / "files.img"
    (space,), opened = _read_messages(mm, "mm"), _read_messages(files, "file")
    head, *entries = _read_messages(pagemap, "pagemap_head", "pagemap")
    runs = list(_split_runs(entries, [(vma.start, vma.end) for vma in space.vmas]))
    if runs and runs[-1][1].offset + runs[-1][1].count * _PAGE != pages.stat().st_size:
        raise UnknownImageError(f"{pages.name} does not contain the pages that {pagemap.name} lists")
    filed: list[_Run] = []
    rest: list[tuple[Any, _Run]] = []
    for group in _join_runs(runs):
        whole = replace(group[0][1], count=sum(run.count for _, run in group))
        if whole.count * _PAGE >= MIN_RUN_BYTES and _is_plain(space.vmas[whole.vma]):
            filed.append(whole)
        else:
            rest += group
    if not filed:
        return 0
    offsets, size = dict[int, int](), 0
    for run in filed:
        offsets[run.address], size = size, size + run.count * _PAGE
    file = _build_file_entry(opened, mapped, size)
    _copy_pages(pages, images / MEMORY_FILE, filed)
    _copy_pages(pages, images / f"{pages.name}.part", [run for _, run in rest])
    (images / f"{pages.name}.part").replace(pages)
    kept = (
        _copy_changed(entry, vaddr=run.address, compat_nr_pages=0, nr_pages=run.count) for entry, run in rest
    )
    _write_messages(pagemap, [head, *kept])
    _remap(space, filed, offsets, file.id)
    _write_messages(mm, [space])
    _write_messages(files, [*opened, file])
    return size


def _split_runs(entries: Iterable[Any], spans: list[tuple[int, int]]) -> Iterator[tuple[Any, _Run]]:
    """Yield each pagemap entry with its run of pages, split at the borders of mappings."""
    starts, kept = [start for start, _ in spans], 0
    for entry in entries:
        if entry.in_parent:
            raise UnknownImageError("the CRIU image is incremental: it needs an earlier image")
        address, count = entry.vaddr, entry.nr_pages or entry.compat_nr_pages
        while count:
            vma = bisect(starts, address) - 1
            here = min(count, (spans[vma][1] - address) // _PAGE) if vma >= 0 else 0
            if here <= 0:
                raise UnknownImageError(f"no mapping of the process contains the page at {address:#x}")
            yield entry, _Run(address, here, kept, vma)
            address, count, kept = address + here * _PAGE, count - here, kept + here * _PAGE


def _join_runs(runs: Iterable[tuple[Any, _Run]]) -> Iterator[list[tuple[Any, _Run]]]:
    """Yield groups of adjacent runs in one mapping. CRIU splits runs when its pipes are full."""
    group: list[tuple[Any, _Run]] = []
    for entry, run in runs:
        if group and (run.address != group[-1][1].end or run.vma != group[-1][1].vma):
            yield group
            group = []
        group.append((entry, run))
    if group:
        yield group


def _is_plain(vma: Any) -> bool:
    """Return whether a mapping is ordinary private memory, readable and writable, that does not grow downwards.

    A mapping with madvise(2) advice is excluded: the kernel rejects some advice (wipe on fork, for example) for files.
    """
    return (
        bool(vma.status & _ANON_PRIVATE and vma.flags & _MAP_ANONYMOUS)
        and vma.prot == _READ_WRITE
        and not vma.flags & (_MAP_GROWSDOWN | _MAP_HUGETLB)
        and not vma.madv
    )


def _remap(space: Any, filed: list[_Run], offsets: Mapping[int, int], file: int) -> None:
    """Replace each run in `filed` in the address space with a mapping of the file that has the number `file`."""
    by_vma: dict[int, list[_Run]] = {}
    for run in filed:
        by_vma.setdefault(run.vma, []).append(run)
    cut: list[Any] = []
    for number, vma in enumerate(space.vmas):
        here = vma.start
        for run in by_vma.get(number, ()):
            if here < run.address:
                cut.append(_copy_changed(vma, start=here, end=run.address))
            of_file = {"pgoff": offsets[run.address], "shmid": file, "fdflags": os.O_RDONLY}
            kind = {"flags": vma.flags & ~_MAP_ANONYMOUS, "status": _REGULAR | _FILE_PRIVATE}
            cut.append(_copy_changed(vma, start=run.address, end=run.end, **of_file, **kind))
            here = run.end
        if here < vma.end:
            cut.append(_copy_changed(vma, start=here))
    del space.vmas[:]
    space.vmas.extend(cut)


def _build_file_entry(opened: list[Any], mapped: Path, size: int) -> Any:
    """Build the `files` entry of the file `mapped`, open for reading, with the owner of a regular file in `opened`."""
    regular = next((one.reg for one in opened if one.HasField("reg")), None)
    if regular is None:
        raise UnknownImageError("the frozen process has no regular file open")
    number = 1 + max(one.id for one in opened)
    file = _build_message_classes()["file"](type=_REG_TYPE, id=number)
    place = {"name": os.fsencode(mapped), "size": size, "flags": os.O_RDONLY}
    file.reg.MergeFrom(_build_message_classes()["reg"](id=number, pos=0, fown=regular.fown, **place))
    return file


def _copy_pages(source: Path, target: Path, runs: Iterable[_Run]) -> None:
    with source.open("rb") as pages, create_file(target, 0o600) as out:
        for run in runs:
            place, left = run.offset, run.count * _PAGE
            while left:
                done = os.sendfile(out.fileno(), pages.fileno(), place, left)
                if not done:
                    raise OSError(f"{source} is truncated within a run of pages")
                place, left = place + done, left - done


def _find_single_image(images: Path, pattern: str) -> Path:
    found = list(images.glob(f"{pattern}.img"))
    if len(found) != 1:
        raise UnknownImageError(f"expected one CRIU image {pattern} of the process, found {len(found)}")
    return found[0]


def _copy_changed(message: Any, **fields: int) -> Any:
    changed = type(message)()
    changed.CopyFrom(message)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _read_messages(image: Path, first: str, others: str = "") -> list[Any]:
    """Read the messages of an image: the first in the format `first`, and the others in `others` (default: the same)."""
    from google.protobuf.message import DecodeError

    data, messages, at = image.read_bytes(), list[Any](), _MAGIC
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        form = _build_message_classes()[others or first if messages else first]
        try:
            messages.append(form.FromString(data[at + 4 : at + 4 + length]))
        except DecodeError as error:
            raise UnknownImageError(f"cannot decode the CRIU image {image.name}: {error}") from error
        at += 4 + length
    if at != len(data) or not messages:
        raise UnknownImageError(f"the CRIU image {image.name} is truncated")
    return messages


def _write_messages(image: Path, messages: Iterable[Any]) -> None:
    magic = image.read_bytes()[:_MAGIC]
    encoded = [one.SerializeToString() for one in messages]
    image.write_bytes(magic + b"".join(struct.pack("<I", len(one)) + one for one in encoded))


@cache
def _build_message_classes() -> Mapping[str, Any]:
    # Imported here, because only a freeze needs it.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file, kinds = descriptor_pb2.FileDescriptorProto(name="criu.proto"), descriptor_pb2.FieldDescriptorProto
    for form, fields in _FIELDS.items():
        added = file.message_type.add(name=form)
        for name, number in fields.items():
            field = added.field.add(name=name, number=number, type=kinds.TYPE_UINT64)
            field.label = kinds.LABEL_OPTIONAL if name in _OPTIONAL else kinds.LABEL_REQUIRED
            if name in ("fown", "name"):
                field.type = kinds.TYPE_BYTES
            elif name in _FIELDS:
                field.type, field.type_name = kinds.TYPE_MESSAGE, name
                field.label = kinds.LABEL_REPEATED if name == "vmas" else kinds.LABEL_OPTIONAL
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return dict(message_factory.GetMessageClassesForFiles(["criu.proto"], pool))
