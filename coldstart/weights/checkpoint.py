"""Files and tensors of a checkpoint, and the weights plan, which is their JSON form.

In load order, files are sorted by name as vLLM sorts them, and the tensors of each file by offset, so the loader requests
bytes in the order in which the prefetcher fetches them. The builder of a plan, its file, the prefetcher and the loader
all use this form. This module does no I/O.

Invariant of a Checkpoint: file names are plain and unique, and tensor names are unique. The tensors of each file are
sorted, lie within the file and do not overlap. `parse` rejects a document that breaks the invariant before memory is
allocated for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import islice, pairwise
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from coldstart.models.checkpoint_files import Size, Tensor, make_natural_key

MAX_CHUNK = 256 << 20


class InvalidWeightsPlanError(ValueError):
    """Error for a weights plan that breaks the invariant of a checkpoint. The message names the invalid part."""


class CheckpointFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of `size` bytes.

    `chunks` are the SHA-256 digests of its `spans` in hexadecimal, or None if they are unknown.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^(?!\.\.?\Z)[^/\\\x00]{1,255}\Z")]
    size: Size
    tensors: tuple[Tensor, ...]
    chunks: tuple[Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")], ...] | None = None

    def spans(self, chunk: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield (start, end, tensor) for consecutive parts of at most `chunk` bytes that together make up the file.

        Each part belongs to one tensor, or to the header, for which `tensor` is None.
        """
        at = 0
        for tensor in (*self.tensors, None):
            start, stop = (self.size, self.size) if tensor is None else (tensor.offset, tensor.end)
            for first, last, owner in ((at, start, None), (start, stop, tensor)):
                yield from ((one, min(one + chunk, last), owner) for one in range(first, last, chunk))
            at = stop


class Checkpoint(msgspec.Struct, frozen=True):
    """Files of a model, whose tensors are divided into chunks of at most `chunk` bytes."""

    chunk: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK)]
    files: tuple[CheckpointFile, ...]

    def document(self) -> dict[str, Any]:
        """Return the weights plan as JSON data."""
        return dict(msgspec.json.decode(msgspec.json.encode(self)))


def parse(document: Mapping[str, Any]) -> Checkpoint:
    """Parse a weights plan from JSON data.

    Raises:
        InvalidWeightsPlanError: The plan lacks a field or breaks the invariant.
    """
    try:
        plan = msgspec.convert(document, Checkpoint)
        names = [file.name for file in plan.files], [one.name for file in plan.files for one in file.tensors]
        if twice := [name for kind in names for name, number in Counter(kind).items() if number > 1]:
            raise ValueError(f"the name {twice[0]!r} occurs twice in the weights plan")
        return Checkpoint(plan.chunk, tuple(_sort(file, plan.chunk) for file in plan.files))
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidWeightsPlanError(str(error)) from error


def _sort(file: CheckpointFile, chunk: int) -> CheckpointFile:
    """Return the file with sorted tensors. Raises ValueError if they break the invariant."""
    tensors = sorted(file.tensors, key=lambda tensor: (tensor.offset, tensor.end))
    if outside := next((tensor for tensor in tensors if tensor.end > file.size), None):
        raise ValueError(f"tensor {outside.name!r} ends beyond the {file.size} bytes of {file.name}")
    for before, after in pairwise(tensors):
        if after.offset < before.end:
            raise ValueError(f"tensors {before.name!r} and {after.name!r} overlap")
    file = replace(file, tensors=tuple(tensors))
    if file.chunks is not None:
        number = sum(1 for _ in islice(file.spans(chunk), len(file.chunks) + 1))
        if number != len(file.chunks):
            raise ValueError(
                f"{file.name} has {len(file.chunks)} chunk digests, expected {number}: one for each {chunk} bytes"
            )
    return file


class UnreadableWeightsError(ValueError):
    """Error for weights that cannot be loaded tensor by tensor. The message states the reason."""


def list_tensors(plan: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a weights plan in load order.

    Raises:
        UnreadableWeightsError: The plan is invalid, or a file has no tensors (it is not in safetensors format).
    """
    try:
        files = sorted(parse(plan).files, key=lambda file: make_natural_key(file.name))
    except InvalidWeightsPlanError as error:
        raise UnreadableWeightsError(str(error)) from error
    if bare := [file.name for file in files if not file.tensors]:
        raise UnreadableWeightsError(f"{bare[0]} contains no tensors in safetensors format")
    return [replace(tensor, file=file.name) for file in files for tensor in file.tensors]


def select_tensors(tensors: list[Tensor], names: Collection[str]) -> list[Tensor]:
    """Return the tensors with these names, in the order of the plan."""
    wanted = set(names)
    return [tensor for tensor in tensors if tensor.name in wanted]
