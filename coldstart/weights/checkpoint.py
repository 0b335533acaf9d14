"""Checkpoint as data, and its JSON form: the weights plan.

The builder of a plan, its file, the prefetcher and the loader all use this form. This module does no I/O.

Invariant of a Checkpoint: file names are plain and unique, and tensor names are unique. The tensors of one
file are sorted, lie within it and do not overlap. `parse` rejects a document that breaks the invariant before
memory is allocated for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Annotated, Any

import msgspec

from coldstart.models.safetensors import MAX_DIMENSION

MAX_CHUNK = 256 << 20
MAX_BYTES = 1 << 46
_PREFIX = "sha256:"


class InvalidWeightsPlanError(ValueError):
    """Weights plan that breaks the invariant; the message names the invalid part."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `size` bytes at `offset` of `file`; `dtype` is the safetensors name.

    `digest` (sha256:...) is empty if only the header of the file was read.
    """

    name: str
    file: str
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    digest: str = ""

    @property
    def end(self) -> int:
        """Return the offset of the first byte after the tensor."""
        return self.offset + self.size

    def document(self) -> dict[str, Any]:
        """Return the tensor's entry in the weights plan."""
        header = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}
        place = {"offset": self.offset, "size": self.size}
        return header | place | ({"digest": self.digest} if self.digest else {})


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of `size` bytes; `chunks` are the SHA-256 digests of `spans` in hexadecimal, or None without digests."""

    name: str
    size: int
    chunks: tuple[str, ...] | None
    tensors: tuple[Tensor, ...]

    def spans(self, chunk: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield (start, end, tensor) of consecutive parts of at most `chunk` bytes that together are the file.

        A part belongs to one tensor, or to none (None): the header.
        """
        at = 0
        for tensor in (*self.tensors, None):
            start, stop = (self.size, self.size) if tensor is None else (tensor.offset, tensor.end)
            for first, last, owner in ((at, start, None), (start, stop, tensor)):
                yield from ((one, min(one + chunk, last), owner) for one in range(first, last, chunk))
            at = stop

    def document(self) -> dict[str, Any]:
        """Return the file's entry in the weights plan."""
        chunks = {} if self.chunks is None else {"chunks": list(self.chunks)}
        tensors = [tensor.document() for tensor in self.tensors]
        return {"name": self.name, "size": self.size, **chunks, "tensors": tensors}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files of a model, whose tensors are divided into chunks of at most `chunk` bytes."""

    chunk: int
    files: tuple[CheckpointFile, ...]

    def document(self) -> dict[str, Any]:
        """Return the weights plan."""
        return {"chunk": self.chunk, "files": [file.document() for file in self.files]}


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class _TensorEntry(msgspec.Struct):
    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_DIMENSION)], ...]
    offset: _Size
    size: _Size
    digest: Annotated[str, msgspec.Meta(pattern=r"^(sha256:)?[0-9a-f]{64}\Z")] = ""


class _FileEntry(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(pattern=r"^[^/\\\x00]{1,255}\Z")]
    size: _Size
    tensors: list[_TensorEntry]
    chunks: tuple[Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")], ...] | None = None


class _Plan(msgspec.Struct):
    chunk: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK)]
    files: list[_FileEntry]


def parse(document: Mapping[str, Any]) -> Checkpoint:
    """Parse a weights plan.

    Raises:
        InvalidWeightsPlanError: The plan lacks a field or breaks the invariant.
    """
    try:
        plan = msgspec.convert(document, _Plan)
        files = tuple(_file(entry, plan.chunk) for entry in plan.files)
        _require_unique(file.name for file in files)
        _require_unique(tensor.name for file in files for tensor in file.tensors)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidWeightsPlanError(str(error)) from error
    return Checkpoint(plan.chunk, files)


def _file(entry: _FileEntry, chunk: int) -> CheckpointFile:
    name, size, chunks = entry.name, entry.size, entry.chunks
    if name in (".", ".."):
        raise ValueError(f"{name!r} is not a plain file name")
    tensors = sorted((_tensor(t, name) for t in entry.tensors), key=lambda t: (t.offset, t.end))
    if outside := next((tensor for tensor in tensors if tensor.end > size), None):
        raise ValueError(f"tensor {outside.name!r} ends after the {size} bytes of {name}")
    for before, after in pairwise(tensors):
        if after.offset < before.end:
            raise ValueError(f"tensors {before.name!r} and {after.name!r} overlap")
    file = CheckpointFile(name, size, chunks, tuple(tensors))
    if chunks is not None and len(chunks) != (
        number := sum(1 for _ in islice(file.spans(chunk), len(chunks) + 1))
    ):
        raise ValueError(
            f"{name} has {len(chunks)} digests of chunks, expected {number} of at most {chunk} bytes"
        )
    return file


def _tensor(entry: _TensorEntry, file: str) -> Tensor:
    digest = entry.digest and _PREFIX + entry.digest.removeprefix(_PREFIX)
    return Tensor(entry.name, file, entry.offset, entry.size, entry.dtype, entry.shape, digest)


def _require_unique(names: Iterable[str]) -> None:
    known: set[str] = set()
    for name in names:
        if name in known:
            raise ValueError(f"the name {name!r} occurs twice")
        known.add(name)
