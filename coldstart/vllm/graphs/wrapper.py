"""Restore graphs in the runner of v1/worker/gpu_model_runner.py, by filling entries of its CUDAGraphWrapper.

Only full graphs are restored. A piece of a model reads memory that the piece before it wrote, so a restored piece beside a
captured one would read unwritten memory. vLLM runs both forwards of every size for pieces anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from coldstart.vllm.graphs.graph_source import GraphSource, Log, attempt, graph_key


def restoring(
    original: Callable[..., None], runner: Any, source: GraphSource, log: Log
) -> Callable[..., None]:
    """Wrap warm-up and capture for this runner only: a draft model's runner has descriptors with the same keys."""

    @functools.wraps(original)
    def warm_up_and_capture(
        self: Any, desc: Any, cudagraph_runtime_mode: Any, *rest: Any, **keywords: Any
    ) -> None:
        key = graph_key(desc, cudagraph_runtime_mode.name)
        mine = self is runner and cudagraph_runtime_mode.name == "FULL"
        entries = _entries(self.model) if mine else None
        if entries is not None and source.usable(key):
            if not source.is_first(key):
                _hide_until_built(self, desc, cudagraph_runtime_mode, entries, source, key)
                return
            if _fill_entry(entries, desc, key, source, log):
                return
        original(self, desc, cudagraph_runtime_mode, *rest, **keywords)

    return warm_up_and_capture


def _hide_until_built(
    runner: Any, desc: Any, mode: Any, entries: dict[Any, Any], source: GraphSource, key: str
) -> None:
    keys = runner.cudagraph_dispatcher.cudagraph_keys[mode]
    keys.discard(desc)

    def show() -> None:
        entries[desc] = _entry(desc, key, source)
        keys.add(desc)

    source.defer(key, show)


def _entries(wrapper: Any) -> dict[Any, Any] | None:
    """Return the wrapper's table, None without one or if its debug mode compares input addresses at each replay."""
    if getattr(wrapper, "is_debugging_mode", True):
        return None
    entries: dict[Any, Any] | None = getattr(wrapper, "concrete_cudagraph_entries", None)
    return entries


def _fill_entry(entries: dict[Any, Any], desc: Any, key: str, source: GraphSource, log: Log) -> bool:
    return attempt(entries, desc, functools.partial(_entry, desc, key, source), key, log)


def _entry(desc: Any, key: str, source: GraphSource) -> Any:
    """Return a finished entry of the wrapper, which replays as after a capture."""
    from vllm.compilation.cuda_graph import CUDAGraphEntry

    graph, output = source.replayable(key), source.output(key)
    return CUDAGraphEntry(batch_descriptor=desc, cudagraph=graph, output=output, input_addresses=[])


def watched_capture(
    original: Callable[..., None], runner: Any, seen: Callable[[str], None]
) -> Callable[..., None]:
    @functools.wraps(original)
    def warm_up_and_capture(
        self: Any, desc: Any, cudagraph_runtime_mode: Any, *rest: Any, **keywords: Any
    ) -> None:
        original(self, desc, cudagraph_runtime_mode, *rest, **keywords)
        if self is runner and cudagraph_runtime_mode.name == "FULL":
            seen(graph_key(desc, "FULL"))

    return warm_up_and_capture
