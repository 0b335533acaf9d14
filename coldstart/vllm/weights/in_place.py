"""Use the source's memory as parameters instead of copying, where vLLM's weight loaders would copy everything.

vLLM's loaders determine the place of a tensor (fused, padded, sharded) by copying it there. They still run, but the copy
is deferred: dst[a:b] = src is noted. Once the notes cover a parameter:
address(src_i) - address(dst_i) equal for all notes  -> the parameter becomes that memory, nothing is copied
otherwise                                            -> threads make the copies and also fault in the pages
Invariant: any other operation on a noted parameter or its sources sees all copies made.
"""

from __future__ import annotations

import ctypes
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from coldstart.system.proc import memory

# One thread faults while the other copies; more threads would wait for the address space.
COPIERS = 2
# Bytes faulted in and then written at once: few enough to stay in the cache, enough to be worth a system call.
PIECE = 8 << 20
# Reference count of a storage that only a parameter has: the parameter, and the Python object of the query.
_ALONE = 2


class Noted:
    """A parameter and its deferred copies; `copies` are in flight."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.base: int = parameter.data_ptr()
        self.size: int = parameter.nbytes
        self.copies: list[Future[None]] = []
        # Keep the memory, so that code that replaces the parameter's memory does not free the target of copies.
        self._memory = parameter.data
        self._notes: list[tuple[int, torch.Tensor]] = []
        self._spans: list[tuple[int, int]] = []
        self._covered, self._apart = 0, set[int]()

    @property
    def aligned(self) -> bool:
        """Return whether the sources have the same relative addresses as their targets in the parameter."""
        return len(self._apart) == 1

    @property
    def is_complete(self) -> bool:
        """Return whether the notes cover the parameter, and it still has the memory of the notes."""
        return self._covered == self.size and bool(self.parameter.data_ptr() == self.base)

    @property
    def start(self) -> int:
        """Return the address of the first source byte; valid if the sources are aligned."""
        return self.base + min(self._apart)

    def add(self, target: int, source: torch.Tensor) -> bool:
        """Note source -> address `target`. Return False if a note already covers a part of it."""
        span = (target - self.base, target - self.base + source.nbytes)
        at = bisect(self._spans, span)
        if any(span[0] < end and start < span[1] for start, end in self._spans[max(0, at - 1) : at + 1]):
            return False
        self._spans.insert(at, span)
        self._notes.append((target, source))
        self._covered += source.nbytes
        self._apart.add(source.data_ptr() - target)
        return True

    def make(self, copiers: ThreadPoolExecutor) -> None:
        """Start the noted copies."""
        for target, source in self._notes[len(self.copies) :]:
            self.copies.append(copiers.submit(_copied, target, source))

    def wait(self) -> None:
        """Wait until the started copies are done."""
        for copy in self.copies:
            copy.result()


class InPlace(TorchDispatchMode):
    """Mode that defers copies from offered tensors into complete CPU parameters as described above.

    `given_bytes` were taken over without a copy. One thread loads. It must not write to the offered tensors, nor
    expect them unchanged after it has written to the parameter that uses their memory.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self.given_bytes = 0
        self._targets = {one.data_ptr(): Noted(one) for one in list(parameters) if _fit(one)}
        self._mappings: dict[int, memoryview] = {}
        self._sources: dict[int, Noted] = {}
        self._copiers = ThreadPoolExecutor(COPIERS, "weights copier")

    def offer(self, tensor: torch.Tensor, view: memoryview) -> torch.Tensor:
        """Register the tensor over `view`, a slice of a private mapping, as a source, and return it."""
        if tensor.nbytes:
            self._mappings[tensor.data_ptr()] = memoryview(view.obj)
        return tensor

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        left, self._targets, self._sources = list(self._targets.values()), {}, {}
        for noted in left:
            noted.make(self._copiers)
        self._copiers.shutdown(wait=True)
        for noted in left:
            noted.wait()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Defer the copy, or run the operation after all deferred copies of its tensors."""
        if func is torch.ops.aten.copy_.default and self._put_off(args[0], args[1]):
            return args[0]
        if not func.is_view:
            for storage in _storages((args, kwargs)):
                self._finish(storage)
        return func(*args, **kwargs or {})

    def _put_off(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        if not _same(target, source):
            return False
        noted, held = self._targets.get(_storage(target)), _storage(source)
        # One source serves one parameter, which waits for it alone.
        if noted is None or held not in self._mappings or self._sources.get(held, noted) is not noted:
            return False
        if not noted.add(target.data_ptr(), source):
            return False
        self._sources[held] = noted
        if noted.copies or not noted.aligned:
            noted.make(self._copiers)
        elif noted.is_complete:
            self._give(noted, self._mappings[held])
        return True

    def _give(self, noted: Noted, mapping: memoryview) -> None:
        """Make the sources' memory the parameter's memory."""
        parameter, start = noted.parameter, noted.start - memory.address(mapping)
        whole = torch.frombuffer(mapping[start : start + noted.size], dtype=parameter.dtype)
        self.given_bytes += noted.size
        parameter.data = whole.view(parameter.shape)
        del self._targets[noted.base]

    def _finish(self, storage: int) -> None:
        """Finish everything deferred for this storage, as a parameter or as a source."""
        for noted in (self._targets.get(storage), self._sources.get(storage)):
            if noted is not None and noted.base in self._targets:
                noted.make(self._copiers)
                noted.wait()

    def own(self, model: torch.nn.Module) -> None:
        """Copy the parts of a model that are still mapped memory, each once, so that it does not depend on the source."""
        mappings = {memory.address(mapping): len(mapping) for mapping in self._mappings.values()}
        copies: dict[int, torch.UntypedStorage] = {}
        for tensor in _tensors(model):
            held = _storage(tensor)
            if any(0 <= held - start < size for start, size in mappings.items()):
                if held not in copies:
                    copies[held] = tensor.untyped_storage().clone()
                place = tensor.storage_offset(), tensor.shape, tensor.stride()
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(copies[held], *place)
        self._mappings.clear()


def _fit(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter can change its memory: it is on the CPU, and no other object has a view of it."""
    if parameter.device.type != "cpu" or not parameter.nbytes or not parameter.is_contiguous():
        return False
    if parameter.is_inference() != torch.is_inference_mode_enabled():
        return False
    # Not public, but the only way to detect a buffer or attribute that is a view; without it nothing is deferred.
    users = getattr(torch._C, "_storage_Use_Count", lambda _: 0)(parameter.untyped_storage()._cdata)
    return bool(users == _ALONE)


def _same(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a copy means the same bytes in the same order."""
    same: bool = (
        target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
        and source.nbytes > 0
    )
    return same


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _storages(arguments: Any) -> Iterator[int]:
    return (_storage(one) for one in tree_iter(arguments) if _plain(one) and one.numel())


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, and other tensors that modules hold."""
    for module in model.modules():
        for kept in (module._parameters, module._buffers, vars(module)):
            yield from (one for one in kept.values() if _plain(one))


def _plain(one: Any) -> bool:
    """Return whether the object is a tensor with CPU memory."""
    return isinstance(one, torch.Tensor) and one.layout is torch.strided and one.device.type == "cpu"


def _copied(target: int, source: torch.Tensor) -> None:
    """Copy into new memory piece by piece: the pages of a piece are mapped at once and still cached when written."""
    for start in range(0, source.nbytes, PIECE):
        size = min(PIECE, source.nbytes - start)
        memory.fresh(target + start, size)
        ctypes.memmove(target + start, source.data_ptr() + start, size)
