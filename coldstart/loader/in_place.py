"""Parameters that are the source's own memory: what vLLM's weight loaders would copy whole is handed over instead.

vLLM's loaders say where a tensor goes (fused, padded, sharded) by copying it there. They are left to say it, but the copy
is put off: dst[a:b] = src is noted, and once the notes cover a parameter,
  address(src_i) - address(dst_i) equal for all notes  -> the parameter becomes that memory, nothing is copied
  otherwise                                            -> the copies are made, by threads that fault in the pages, too
Invariant: whatever else touches a noted parameter or its sources finds every copy made, so nobody sees a difference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from coldstart.loader import memory

# One faults while the other copies: more of them wait for the address space.
COPIERS = 2
# Faulted in and then written: little enough to be hot still, enough for the fault to be worth a call.
PIECE = 8 << 20


@dataclass
class Noted:
    """A parameter and the copies into it that were put off: (offset, source), not overlapping; `made` are under way."""

    parameter: torch.nn.Parameter
    base: int
    notes: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    made: list[Future[None]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether the notes cover the parameter."""
        return sum(source.nbytes for _, source in self.notes) == self.parameter.nbytes

    @property
    def aligned(self) -> bool:
        """Whether the sources lie in memory as they shall lie in the parameter."""
        return len({source.data_ptr() - offset for offset, source in self.notes}) == 1

    def overlaps(self, offset: int, size: int) -> bool:
        """Whether a note covers one of these bytes already."""
        return any(o < offset + size and offset < o + source.nbytes for o, source in self.notes)


class InPlace(TorchDispatchMode):
    """Within the block, copies from offered tensors into whole parameters on the CPU are put off as above.

    `given_bytes` were taken over without a copy. One thread loads; the sources do not change while the block lasts.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self.given_bytes = 0
        self._targets = {one.data_ptr(): Noted(one, one.data_ptr()) for one in parameters if _whole(one)}
        self._mappings: dict[int, memoryview] = {}
        self._given: set[int] = set()
        self._sources: dict[int, Noted] = {}
        self._copiers = ThreadPoolExecutor(COPIERS, "weights copier")

    def offer(self, tensor: torch.Tensor, view: memoryview) -> torch.Tensor:
        """The tensor over `view`, a slice of a private mapping."""
        if tensor.nbytes:
            self._mappings[tensor.data_ptr()] = memoryview(view.obj)  # type: ignore[arg-type]
        return tensor

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for noted in self._targets.values():
            self._make(noted)
        self._copiers.shutdown(wait=True)
        for noted in self._targets.values():
            _wait(noted)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note the copy, or do what was asked when everything before it is done."""
        if func is torch.ops.aten.copy_.default and self._put_off(args[0], args[1]):
            return args[0]
        if not func.is_view:
            for storage in _storages((args, kwargs)):
                self._finish(storage)
        return func(*args, **kwargs or {})

    def _put_off(self, into: torch.Tensor, source: torch.Tensor) -> bool:
        noted, memory_of = self._targets.get(_storage(into)), _storage(source)
        if noted is None or memory_of not in self._mappings or not _same(into, source):
            return False
        offset = into.data_ptr() - noted.base
        if noted.overlaps(offset, source.nbytes):
            return False
        noted.notes.append((offset, source))
        self._sources[memory_of] = noted
        if noted.made or not noted.aligned or memory_of in self._given:
            self._make(noted)
        elif noted.whole:
            self._give(noted)
        return True

    def _give(self, noted: Noted) -> None:
        """The parameter becomes the sources' memory. What one has got, no other gets."""
        parameter, (_, first) = noted.parameter, min(noted.notes, key=lambda note: note[0])
        mapping = self._mappings[_storage(first)]
        start = first.data_ptr() - memory.address(mapping)
        whole = torch.frombuffer(mapping[start : start + parameter.nbytes], dtype=parameter.dtype)
        self._given |= {_storage(source) for _, source in noted.notes}
        self.given_bytes += parameter.nbytes
        parameter.data = whole.view(parameter.shape)
        del self._targets[noted.base]

    def _make(self, noted: Noted) -> None:
        for offset, source in noted.notes[len(noted.made) :]:
            noted.made.append(self._copiers.submit(_copied, noted.base + offset, source))

    def _finish(self, storage: int) -> None:
        """Let everything that was put off for this storage, as a parameter's or as a source's, be done."""
        for noted in (self._targets.get(storage), self._sources.get(storage)):
            if noted is not None and noted.base in self._targets:
                self._make(noted)
                _wait(noted)

    def own(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy those that still are mapped memory: from here on nothing depends on the source."""
        mappings = {memory.address(mapping): len(mapping) for mapping in self._mappings.values()}
        for parameter in parameters:
            if any(0 <= parameter.data_ptr() - start < size for start, size in mappings.items()):
                parameter.data = parameter.data.clone()
        self._mappings.clear()


def _whole(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is all of its memory, on the CPU."""
    on_cpu = parameter.device.type == "cpu" and parameter.nbytes > 0
    return on_cpu and parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes


def _same(into: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether copying means the same bytes in the same order."""
    return (
        into.dtype == source.dtype
        and into.shape == source.shape
        and into.is_contiguous()
        and source.is_contiguous()
        and source.nbytes > 0
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(arguments: Any) -> Iterator[int]:
    tensors = (one for one in tree_iter(arguments) if isinstance(one, torch.Tensor))
    return (_storage(tensor) for tensor in tensors if tensor.numel() and tensor.device.type == "cpu")


def _wait(noted: Noted) -> None:
    for copy in noted.made:
        copy.result()


def _copied(target: int, source: torch.Tensor) -> None:
    """Copy into fresh memory, piece by piece: the pages of one are mapped at once, and hot when it is written."""
    for start in range(0, source.nbytes, PIECE):
        size = min(PIECE, source.nbytes - start)
        memory.fresh(target + start, size)
        ctypes.memmove(target + start, source.data_ptr() + start, size)
