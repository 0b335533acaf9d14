"""Restore graphs in the runner of v1/worker/gpu, whose dispatch sees only the built ones of its CudaGraphManager."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from coldstart.vllm.graphs.graph_source import GraphSource, Log, attempt, graph_key


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


def restoring(
    original: Callable[..., None], runner: Any, source: GraphSource, log: Log
) -> Callable[..., None]:
    """Wrap `capture` for this runner's own manager only: those of a draft model inherit it and have the same keys."""

    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Any, *arguments: Any, **keywords: Any) -> None:
        profiling = self._max_full_descs_to_capture is not None  # profiling discards its captures
        if profiling or self is not runner.cudagraph_manager:
            original(self, create_forward_fn, *arguments, **keywords)
            return
        restored, waiting = _restored_graphs(self, source, log)
        with _without(self._capture_descs, {*restored, *waiting}):
            original(self, create_forward_fn, *arguments, **keywords)
        self.graphs.update(restored)
        curtain = Curtain(self)
        for descriptor, key in waiting.items():
            curtain.hide(descriptor)
            source.defer(key, functools.partial(_show, curtain, descriptor, source, key))

    return capture


def _show(curtain: Curtain, descriptor: Any, source: GraphSource, key: str) -> None:
    curtain.show(descriptor, source.replayable(key))


def _restored_graphs(manager: Any, source: GraphSource, log: Log) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Return full graphs by descriptor, and keys of graphs built in the background; give the manager its buffers."""
    restored: dict[Any, Any] = {}
    waiting: dict[Any, str] = {}
    for descriptors in manager._capture_descs.values():
        for descriptor in descriptors:
            key = graph_key(descriptor, descriptor.cg_mode.name)
            if descriptor.cg_mode.name != "FULL" or not source.usable(key):
                continue
            if source.is_first(key):
                attempt(restored, descriptor, functools.partial(source.replayable, key), key, log)
            else:
                waiting[descriptor] = key
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


def watched_capture(
    original: Callable[..., None], runner: Any, seen: Callable[[str], None]
) -> Callable[..., None]:
    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Any, *arguments: Any, **keywords: Any) -> None:
        def watched(descriptor: Any, *rest: Any, **more: Any) -> Any:
            forward = create_forward_fn(descriptor, *rest, **more)
            warmup = more.get("warmup", rest[:1] == (True,))  # the capture's inputs are written again
            if not warmup and self is runner.cudagraph_manager and descriptor.cg_mode.name == "FULL":
                seen(graph_key(descriptor, "FULL"))
            return forward

        original(self, watched, *arguments, **keywords)

    return capture
