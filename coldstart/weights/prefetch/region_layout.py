"""Layout of a checkpoint in the shared region: the offset of each file.

Invariant: every byte belongs to one check, and each tensor consists of complete checks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coldstart.weights import checkpoint
from coldstart.weights.checkpoint import Tensor
from coldstart.weights.prefetch.byte_ranges import Ranges
from coldstart.weights.prefetch.errors import PrefetchRefusedError

# Alignment of files in the region in bytes, so that a huge page holds bytes of one file only.
ALIGN = 2 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """Digest check: bytes [start, end) of a file have the SHA-256 `digest`; `tensor` is their tensor, if they have one."""

    start: int
    end: int
    digest: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True)
class RegionFile:
    """One file; `base` is its offset in the region, and `checks` cover it in order."""

    name: str
    size: int
    base: int
    checks: tuple[Check, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class RegionLayout:
    """Layout of a valid plan; `total` is the size of the region in bytes."""

    chunk: int
    files: tuple[RegionFile, ...]
    total: int
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, int]

    def wanted(self, names: Collection[str] | None) -> list[Ranges]:
        """Return the bytes of the tensors `names` for each file; None means every byte.

        A file whose tensors are all requested is included with its header. Raises PrefetchRefusedError if the
        plan lacks a tensor.
        """
        if names is None:
            return [Ranges([(0, file.size)]) for file in self.files]
        ranges = [Ranges() for _ in self.files]
        chosen = [0] * len(self.files)
        for name in set(names):
            tensor = self._tensor(name)
            number = self.numbers[tensor.file]
            ranges[number].add(tensor.offset, tensor.end)
            chosen[number] += 1
        for number, file in enumerate(self.files):
            if file.tensors and chosen[number] == len(file.tensors):
                ranges[number].add(0, file.size)
        return ranges

    def _tensor(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except (KeyError, TypeError):
            raise PrefetchRefusedError(f"the plan has no tensor {name!r}") from None


def read(document: Mapping[str, Any]) -> RegionLayout:
    """Return the layout of a plan that `coldstart.weights.weights_plan.plan` built.

    Raises:
        PrefetchRefusedError: The plan is malformed, empty or without digests.
    """
    try:
        plan = checkpoint.parse(document)
    except checkpoint.InvalidWeightsPlanError as error:
        raise PrefetchRefusedError(f"the weights plan is malformed: {error}") from error
    files = tuple(_placed(plan))
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    total = sum(_rounded(file.size) for file in files)
    if not 0 < total <= checkpoint.MAX_BYTES:
        raise PrefetchRefusedError(
            f"the weights plan describes {total} bytes, expected 1 to {checkpoint.MAX_BYTES}"
        )
    return RegionLayout(plan.chunk, files, total, tensors, {file.name: n for n, file in enumerate(files)})


def _placed(plan: checkpoint.Checkpoint) -> Iterable[RegionFile]:
    base = 0
    for file in plan.files:
        if file.chunks is None:
            raise PrefetchRefusedError(f"the weights plan has no digests for {file.name}")
        spans = zip(file.spans(plan.chunk), file.chunks, strict=True)
        checks = tuple(Check(start, end, digest, tensor) for (start, end, tensor), digest in spans)
        yield RegionFile(file.name, file.size, base, checks, file.tensors)
        base += _rounded(file.size)


def _rounded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
