"""A weights plan read with suspicion: files, tensors and digests, and where each file lies in the shared region.

Invariant of a Layout: names are plain and unique, tensors of one file are sorted, lie within it and do not overlap, and
every chunk has a digest. A plan that breaks it is refused as a whole, before anything is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coldstart.weights.prefetch.errors import PrefetchRefused
from coldstart.weights.prefetch.ranges import Ranges

MAX_CHUNK = 256 << 20
MAX_BYTES = 1 << 46
# Files start on such a boundary of the region, so that huge pages hold one file only.
ALIGN = 2 << 20
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Bytes [start, end) of file number `file`, and their sha256 in hexadecimal."""

    name: str
    file: int
    start: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class File:
    """One file: `base` is its offset in the region; `chunks` are sha256 in hexadecimal."""

    name: str
    size: int
    base: int
    chunks: tuple[str, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """A valid plan. `total` is the size of the region in bytes."""

    chunk: int
    files: tuple[File, ...]
    total: int
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, int]

    def wanted(self, names: Collection[str] | None) -> list[Ranges]:
        """The bytes of the tensors `names`, by file; a file all of whose tensors are wanted counts as a whole.

        None means every byte. Raises PrefetchRefused for a name that the plan does not know.
        """
        if names is None:
            return [Ranges([(0, file.size)]) for file in self.files]
        found = [Ranges() for _ in self.files]
        chosen = [0] * len(self.files)
        for name in set(names):
            tensor = self._tensor(name)
            found[tensor.file].add(tensor.start, tensor.end)
            chosen[tensor.file] += 1
        for number, file in enumerate(self.files):
            if file.tensors and chosen[number] == len(file.tensors):
                found[number].add(0, file.size)
        return found

    def _tensor(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except (KeyError, TypeError):
            raise PrefetchRefused(f"The plan has no tensor {name!r}.") from None


def read(plan: Mapping[str, Any]) -> Layout:
    """Check a plan as `coldstart.weights.plan.plan` makes it. Raises PrefetchRefused naming what is wrong."""
    try:
        chunk = _number(plan["chunk"], "chunk", 1, MAX_CHUNK)
        files = tuple(_files(plan["files"], chunk))
        tensors = _unique((t.name, t) for file in files for t in file.tensors)
        numbers = _unique((file.name, number) for number, file in enumerate(files))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise PrefetchRefused(f"The weights plan is malformed: {error!r}.") from error
    total = sum(_rounded(file.size) for file in files)
    if not 0 < total <= MAX_BYTES:
        raise PrefetchRefused(f"The weights plan describes {total} bytes.")
    return Layout(chunk, files, total, tensors, numbers)


def _files(entries: Any, chunk: int) -> Iterable[File]:
    base = 0
    for number, entry in enumerate(entries):
        name = _plain_name(entry["name"])
        size = _number(entry["size"], f"size of {name}", 0, MAX_BYTES)
        chunks = tuple(_hex(digest) for digest in entry["chunks"])
        if len(chunks) != -(-size // chunk):
            raise ValueError(f"{name} has {len(chunks)} chunks of {chunk} for {size} bytes")
        yield File(name, size, base, chunks, tuple(_tensors(entry["tensors"], number, size)))
        base += _rounded(size)


def _tensors(entries: Any, file: int, size: int) -> Iterable[Tensor]:
    made = [
        Tensor(
            str(entry["name"]),
            file,
            start := _number(entry["offset"], "offset", 0, size),
            start + _number(entry["size"], "size", 0, size - start),
            _hex(entry["digest"].removeprefix("sha256:")),
        )
        for entry in entries
    ]
    made.sort(key=lambda tensor: (tensor.start, tensor.end))
    for before, after in pairwise(made):
        if after.start < before.end:
            raise ValueError(f"tensors {before.name!r} and {after.name!r} overlap")
    return made


def _plain_name(name: Any) -> str:
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= 255
        or name in (".", "..")
        or set(name) & set("/\\\0")
    ):
        raise ValueError(f"{name!r} is no plain file name")
    return name


def _number(value: Any, what: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {value!r}")
    return value


def _hex(text: Any) -> str:
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        raise ValueError(f"{text!r} is no sha256")
    return text


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs twice")
        found[name] = value
    return found


def _rounded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
