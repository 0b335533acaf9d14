"""Checkpoint as data, and its JSON form: the weights plan.

The builder of a plan, its file, the prefetcher and the loader all use this form. This module does no I/O.

Invariant of a Checkpoint: file names are plain and unique, and tensor names are unique. The tensors of one
file are sorted, lie within it and do not overlap. `parse` rejects a document that breaks the invariant before
memory is allocated for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coldstart.models.safetensors import MAX_DIMENSION

MAX_CHUNK = 256 << 20
MAX_BYTES = 1 << 46
_HEX = re.compile(r"[0-9a-f]{64}")
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

    @property
    def sha256(self) -> str:
        """Return the digest in hexadecimal, without its prefix."""
        return self.digest.removeprefix(_PREFIX)

    def document(self) -> dict[str, Any]:
        """Return the tensor's entry in the weights plan."""
        header = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}
        place = {"offset": self.offset, "size": self.size}
        return header | place | ({"digest": self.digest} if self.digest else {})


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of `size` bytes; `chunks` are SHA-256 digests in hexadecimal, or None if the plan has no digests."""

    name: str
    size: int
    chunks: tuple[str, ...] | None
    tensors: tuple[Tensor, ...]

    def document(self) -> dict[str, Any]:
        """Return the file's entry in the weights plan."""
        chunks = {} if self.chunks is None else {"chunks": list(self.chunks)}
        tensors = [tensor.document() for tensor in self.tensors]
        return {"name": self.name, "size": self.size, **chunks, "tensors": tensors}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files of a model, divided into chunks of `chunk` bytes."""

    chunk: int
    files: tuple[CheckpointFile, ...]

    def document(self) -> dict[str, Any]:
        """Return the weights plan."""
        return {"chunk": self.chunk, "files": [file.document() for file in self.files]}


def parse(document: Mapping[str, Any]) -> Checkpoint:
    """Parse a weights plan.

    Raises:
        InvalidWeightsPlanError: The plan lacks a member or breaks the invariant.
    """
    try:
        chunk = _number(document["chunk"], "chunk", 1, MAX_CHUNK)
        files = tuple(_file(entry, chunk) for entry in document["files"])
        _require_unique(file.name for file in files)
        _require_unique(tensor.name for file in files for tensor in file.tensors)
    except KeyError as error:
        raise InvalidWeightsPlanError(f"the plan lacks {error}") from error
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise InvalidWeightsPlanError(str(error)) from error
    return Checkpoint(chunk, files)


def _file(entry: Any, chunk: int) -> CheckpointFile:
    name = _plain_name(entry["name"])
    size = _number(entry["size"], f"size of {name}", 0, MAX_BYTES)
    chunks = tuple(map(_hex, entry["chunks"])) if "chunks" in entry else None
    if chunks is not None and len(chunks) != -(-size // chunk):
        raise ValueError(
            f"{name} of {size} bytes has {len(chunks)} chunks of {chunk} bytes, expected {-(-size // chunk)}"
        )
    tensors = sorted((_tensor(t, name, size) for t in entry["tensors"]), key=lambda t: (t.offset, t.end))
    for before, after in pairwise(tensors):
        if after.offset < before.end:
            raise ValueError(f"tensors {before.name!r} and {after.name!r} overlap")
    return CheckpointFile(name, size, chunks, tuple(tensors))


def _tensor(entry: Any, file: str, size: int) -> Tensor:
    offset = _number(entry["offset"], "offset", 0, size)
    length = _number(entry["size"], "size", 0, size - offset)
    shape = tuple(_number(extent, "extent", 0, MAX_DIMENSION) for extent in entry["shape"])
    digest = _PREFIX + _hex(entry["digest"].removeprefix(_PREFIX)) if "digest" in entry else ""
    return Tensor(str(entry["name"]), file, offset, length, str(entry["dtype"]), shape, digest)


def _plain_name(name: Any) -> str:
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= 255
        or name in (".", "..")
        or set(name) & set("/\\\0")
    ):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


def _number(value: Any, what: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {value!r}, expected an integer from {least} to {most}")
    return value


def _hex(text: Any) -> str:
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        raise ValueError(f"{text!r} is not a SHA-256 digest")
    return text


def _require_unique(names: Iterable[str]) -> None:
    known: set[str] = set()
    for name in names:
        if name in known:
            raise ValueError(f"the name {name!r} occurs twice")
        known.add(name)
