"""Hook vLLM's capture of CUDA graphs, whose dispatch sees only the built graphs of a CudaGraphManager.

With a source bound, a model runner gets restored full graphs and skips the warm-up and capture of exactly those
batch descriptors. All other descriptors and managers are captured as usual. A graph that is still being
built is hidden from vLLM's dispatch, which then runs such a batch without a full graph; once built it is shown. vLLM
only calls .replay() on the stored graphs. Pieces are not restored: a piece reads memory that the piece before it wrote.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from coldstart.graphs.errors import GraphError, GraphRefusedError
from coldstart.vllm import compat

log = logging.getLogger("vllm.coldstart.graphs")
MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
Capture = Callable[..., None]


class GraphSource(Protocol):
    """Source of restored graphs by graph key."""

    def is_usable(self, key: str) -> bool:
        """Return whether this graph is available without a capture."""

    def is_first(self, key: str) -> bool:
        """Return whether it is available before readiness; other graphs are built in the background."""

    def defer(self, key: str, show: Callable[[], None]) -> None:
        """Build it in the background; `show` is called, in another thread, once it can be replayed."""

    def restore(self, key: str) -> Any:
        """Return an object with replay(). Raises GraphError."""

    def attributes(self) -> Mapping[str, Any]:
        """Return the tensors that capture would have created on the manager, such as hidden_states."""


def require() -> None:
    """Raise GraphRefusedError if graphs were not checked for this vLLM; imports nothing of vLLM."""
    if reason := compat.check("graphs"):
        raise GraphRefusedError(reason)


def refuse_unsupported(runner: Any) -> None:
    """Raise GraphRefusedError for an engine whose graphs cannot be recorded or restored."""
    parallel = runner.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise GraphRefusedError("graphs of several ranks contain collectives, which cannot be restored")
    if runner.vllm_config.use_cumem_cudagraph_pool:
        raise GraphRefusedError(
            "with --sleep-mode-offload-cudagraph vLLM captures graphs into the memory pool of its sleep mode, "
            "which is not recorded"
        )
    if getattr(runner, "cudagraph_manager", None) is None:
        raise GraphRefusedError("this engine uses vLLM's first model runner, whose graphs are not recorded")


def graph_key(descriptor: Any) -> str:
    """Return the graph key of a batch descriptor: its mode and every field that is not a default."""
    names = [n for n in descriptor.__dataclass_fields__ if n != "cg_mode" and getattr(descriptor, n)]
    return f"{descriptor.cg_mode.name}:" + ",".join(f"{n}={getattr(descriptor, n)}" for n in names)


def is_full(descriptor: Any) -> bool:
    """Return whether the descriptor's graph covers the whole forward pass."""
    return bool(descriptor.cg_mode.name == "FULL")


def install(runner: Any, source: GraphSource) -> Callable[[], None]:
    """Restore graphs in this runner, and return the undo. Raises GraphRefusedError, having patched nothing."""
    return _patch(lambda original: restoring(original, runner, source))


def watch(runner: Any, seen: Callable[[str], None]) -> Callable[[], None]:
    """Call `seen` with a full graph's key when its inputs are ready. Return the undo. Raises GraphRefusedError."""
    return _patch(lambda original: watching(original, runner, seen))


def _patch(wrap: Callable[[Capture], Capture]) -> Callable[[], None]:
    require()
    kind = getattr(sys.modules.get(MODULE), "CudaGraphManager", None)
    original = getattr(kind, "capture", None)
    if kind is None or original is None:
        raise GraphRefusedError("vLLM lacks an integration point of graphs: CudaGraphManager.capture")
    kind.capture = wrap(original)
    return lambda: setattr(kind, "capture", original)


class Curtain:
    """Hides descriptors from a manager's dispatch until their graphs are built; the lists keep their order."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._all = manager, {key: list(rows) for key, rows in manager._candidates.items()}
        self._hidden: set[Any] = set()

    def hide(self, descriptor: Any) -> None:
        """Hide the descriptor, so that vLLM runs such a batch without its graph."""
        self._hidden.add(descriptor)
        self._draw()

    def show(self, descriptor: Any, graph: Any) -> None:
        """Store the graph, then show its descriptor, in this order because dispatch runs in another thread."""
        self._manager.graphs[descriptor] = graph
        self.reveal(descriptor)

    def reveal(self, descriptor: Any) -> None:
        """Show the descriptor, whose graph vLLM has captured."""
        self._hidden.discard(descriptor)
        self._draw()

    def _draw(self) -> None:
        hidden = frozenset(self._hidden)
        rows = {key: [d for d in all_ if d not in hidden] for key, all_ in self._all.items()}
        self._manager._candidates = rows


def restoring(original: Capture, runner: Any, source: GraphSource) -> Capture:
    """Wrap `capture` for this runner's own manager only: those of a draft model inherit it and have the same keys."""

    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Any, *arguments: Any, **keywords: Any) -> None:
        profiling = self._max_full_descs_to_capture is not None  # profiling discards its captures
        if profiling or self is not runner.cudagraph_manager:
            original(self, create_forward_fn, *arguments, **keywords)
            return
        restored, waiting = _find_restored(self, source)
        with _without(self._capture_descs, {*restored, *waiting}):
            original(self, create_forward_fn, *arguments, **keywords)
        self.graphs.update(restored)
        curtain = Curtain(self)
        for descriptor, key in waiting.items():
            curtain.hide(descriptor)
            source.defer(key, functools.partial(_show, curtain, descriptor, source, key))

    return capture


def _show(curtain: Curtain, descriptor: Any, source: GraphSource, key: str) -> None:
    curtain.show(descriptor, source.restore(key))


def _find_restored(manager: Any, source: GraphSource) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Return full graphs by descriptor, and keys of graphs built in the background; give the manager its buffers."""
    restored, waiting = dict[Any, Any](), dict[Any, str]()
    for descriptor in (d for rows in manager._capture_descs.values() for d in rows if is_full(d)):
        key = graph_key(descriptor)
        if not source.is_usable(key):
            continue
        if not source.is_first(key):
            waiting[descriptor] = key
            continue
        try:
            restored[descriptor] = source.restore(key)
        except GraphError as error:
            log.warning("%s is captured normally: %s", key, error)
    if restored or waiting:
        for name, value in source.attributes().items():
            setattr(manager, name, value)
    return restored, waiting


@contextlib.contextmanager
def _without(descriptors: dict[Any, list[Any]], taken: set[Any]) -> Iterator[None]:
    """Remove restored descriptors from the capture list in the block, because dispatch reads the list again later."""
    saved = {mode: list(rows) for mode, rows in descriptors.items()}
    for mode, rows in saved.items():
        descriptors[mode] = [row for row in rows if row not in taken]
    try:
        yield
    finally:
        descriptors.update(saved)


def watching(original: Capture, runner: Any, seen: Callable[[str], None]) -> Capture:
    """Wrap `capture` so that `seen` is called for each full graph of this runner's own manager."""

    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Any, *arguments: Any, **keywords: Any) -> None:
        def watched(descriptor: Any, *rest: Any, **more: Any) -> Any:
            forward = create_forward_fn(descriptor, *rest, **more)
            warmup = more.get("warmup", rest[:1] == (True,))  # the capture's inputs are written again
            if not warmup and self is runner.cudagraph_manager and is_full(descriptor):
                seen(graph_key(descriptor))
            return forward

        original(self, watched, *arguments, **keywords)

    return capture
