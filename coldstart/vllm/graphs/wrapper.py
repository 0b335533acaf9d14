"""The runner of v1/worker/gpu_model_runner.py: entries of CUDAGraphWrapper, finished before anything is captured.

A model that is split at its attention has one wrapper for each piece besides; where a piece would be captured, its
restored graph is put in its place, and vLLM replays that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from coldstart.vllm.graphs.source import Log, Source, Span, attempt, key_of

WRAPPER = "vllm.compilation.cuda_graph"


def restoring(original: Callable[..., None], source: Source, log: Log) -> Callable[..., None]:
    @functools.wraps(original)
    def warm_up_and_capture(
        self: Any, desc: Any, cudagraph_runtime_mode: Any, *rest: Any, **keywords: Any
    ) -> None:
        key = key_of(desc, cudagraph_runtime_mode.name)
        entries = _entries(self.model) if cudagraph_runtime_mode.name == "FULL" else None
        if entries is not None and source.usable(key):
            if not source.soon(key):
                _hide_until_built(self, desc, cudagraph_runtime_mode, entries, source, key)
                return
            if _fill_entry(entries, desc, key, source, log):
                return
        original(self, desc, cudagraph_runtime_mode, *rest, **keywords)

    return warm_up_and_capture


def _hide_until_built(
    runner: Any, desc: Any, mode: Any, entries: dict[Any, Any], source: Source, key: str
) -> None:
    keys = runner.cudagraph_dispatcher.cudagraph_keys[mode]
    keys.discard(desc)

    def show() -> None:
        entries[desc] = _entry(desc, key, source)
        keys.add(desc)

    source.later(key, show)


def _entries(wrapper: Any) -> dict[Any, Any] | None:
    """The wrapper's table, unless it is none or its debug mode compares input addresses at each replay."""
    if getattr(wrapper, "is_debugging_mode", True):
        return None
    entries: dict[Any, Any] | None = getattr(wrapper, "concrete_cudagraph_entries", None)
    return entries


def _fill_entry(entries: dict[Any, Any], desc: Any, key: str, source: Source, log: Log) -> bool:
    return attempt(entries, desc, functools.partial(_entry, desc, key, source), key, log)


def _entry(desc: Any, key: str, source: Source) -> Any:
    """A finished entry of the wrapper: replay goes the same way as after a capture."""
    kind = import_module(WRAPPER).CUDAGraphEntry
    graph, output = source.replayable(key), source.output(key)
    return kind(batch_descriptor=desc, cudagraph=graph, output=output, input_addresses=[])


def watched_capture(original: Callable[..., None], seen: Callable[[str], None]) -> Callable[..., None]:
    @functools.wraps(original)
    def warm_up_and_capture(
        self: Any, desc: Any, cudagraph_runtime_mode: Any, *rest: Any, **keywords: Any
    ) -> None:
        original(self, desc, cudagraph_runtime_mode, *rest, **keywords)
        if cudagraph_runtime_mode.name == "FULL":
            seen(key_of(desc, "FULL"))

    return warm_up_and_capture


def pieces() -> list[Any]:
    """Wrappers of compiled pieces that have a number of their own."""
    found = import_module(WRAPPER).CUDAGraphWrapper._all_instances
    return [wrapper for wrapper in found if _number(wrapper) is not None]


def _number(wrapper: Any) -> str | None:
    """Which piece of how many, as vLLM's compiler counts them: the same in every process of one configuration."""
    held = vars(wrapper).get("runnable")
    index, total = (getattr(held, n, None) for n in ("piecewise_compile_index", "total_piecewise_compiles"))
    return None if index is None or total is None else f"{index}of{total}"


def piece_key(wrapper: Any, descriptor: Any) -> str:
    """The graph key of one piece for one batch descriptor."""
    return key_of(descriptor, f"PIECEWISE-{_number(wrapper)}")


def restoring_piece(original: Callable[..., Any], source: Source, log: Log) -> Callable[..., Any]:
    """Where a piece would be captured, its restored graph is put in its place; vLLM then replays that."""
    context = import_module(WRAPPER).get_forward_context

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if _number(self) is not None and (entries := _entries(self)) is not None:
            descriptor = _captured_next(context, self, entries)
            if descriptor is not None and source.usable(key := piece_key(self, descriptor)):
                _fill_entry(entries, descriptor, key, source, log)
        return original(self, *arguments, **keywords)

    return call


def watched_piece(original: Callable[..., Any], fed: Callable[[str, list[Span]], None]) -> Callable[..., Any]:
    context = import_module(WRAPPER).get_forward_context

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if _number(self) is not None:
            descriptor = _captured_next(context, self, self.concrete_cudagraph_entries)
            if descriptor is not None:
                tensors = [a for a in arguments if hasattr(a, "data_ptr")]
                fed(piece_key(self, descriptor), [(int(t.data_ptr()), int(t.nbytes)) for t in tensors])
        return original(self, *arguments, **keywords)

    return call


def _captured_next(context: Callable[[], Any], wrapper: Any, entries: dict[Any, Any]) -> Any:
    """The descriptor for which this call would capture, or None."""
    try:
        here = context()
    except AssertionError:  # no forward pass is going on
        return None
    held = entries.get(here.batch_descriptor)
    wanted = here.cudagraph_runtime_mode == wrapper.runtime_mode
    return here.batch_descriptor if wanted and (held is None or held.cudagraph is None) else None
