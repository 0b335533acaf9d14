"""Hook vLLM's capture of CUDA graphs by a CudaGraphManager.

A model runner gets the restored full graphs and skips the warm-up and capture of exactly those batch descriptors. All other
descriptors and managers are captured as usual. vLLM only calls .replay() on the stored graphs. Pieces are not restored: a
piece reads memory that the piece before it wrote.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coldstart.graphs.errors import GraphRefusedError
from coldstart.vllm import compat

log = logging.getLogger("vllm.coldstart.graphs")
MODULE = "vllm.v1.worker.gpu.cudagraph_utils"


def require() -> None:
    """Raise GraphRefusedError if graphs were not checked for this vLLM; imports nothing of vLLM."""
    if reason := compat.check("graphs"):
        raise GraphRefusedError(reason)


def refuse_unsupported(runner: Any) -> None:
    """Raise GraphRefusedError for an engine whose graphs cannot be recorded or restored."""
    require()
    parallel = runner.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise GraphRefusedError("graphs of several ranks contain collectives, which cannot be restored")
    if getattr(runner, "use_aux_hidden_state_outputs", False):
        raise GraphRefusedError("a draft model reads outputs of inner layers, which are not recorded")
    if runner.vllm_config.use_cumem_cudagraph_pool:
        raise GraphRefusedError(
            "with --sleep-mode-offload-cudagraph vLLM captures graphs into the memory pool of its sleep mode, "
            "which is not recorded"
        )
    if (manager := getattr(runner, "cudagraph_manager", None)) is None:
        raise GraphRefusedError("this engine uses vLLM's first model runner, whose graphs are not recorded")
    if getattr(manager, "ubatch_runner", None) is not None:
        raise GraphRefusedError("vLLM writes the inputs of microbatches only for a capture")


def graph_key(descriptor: Any) -> str:
    """Return the graph key of a batch descriptor: its mode and every field that is not a default."""
    names = [n for n in descriptor.__dataclass_fields__ if n != "cg_mode" and getattr(descriptor, n)]
    return f"{descriptor.cg_mode.name}:" + ",".join(f"{n}={getattr(descriptor, n)}" for n in names)


def is_full(descriptor: Any) -> bool:
    """Return whether the descriptor's graph covers the whole forward pass."""
    return bool(descriptor.cg_mode.name == "FULL")


Instead = Callable[[Mapping[str, Any], Callable[..., Any], Callable[[], None]], None]
"""Work instead of a capture. Its arguments are the descriptors of all full graphs by key, vLLM's function that writes the
inputs of one, and the capture."""


@contextlib.contextmanager
def hooked(runner: Any, instead: Instead) -> Iterator[None]:
    """Call `instead` where this runner captures its graphs.

    This affects the runner's own manager only: the managers of draft models inherit its method and have the same keys.

    Raises:
        GraphRefusedError: This vLLM lacks the method; nothing was patched.
    """
    kind: Any = getattr(sys.modules.get(MODULE), "CudaGraphManager", None)
    original = getattr(kind, "capture", None)
    if original is None:
        raise GraphRefusedError("vLLM lacks an integration point of graphs: CudaGraphManager.capture")

    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Any, *arguments: Any, **keywords: Any) -> None:
        own = functools.partial(original, self, create_forward_fn, *arguments, **keywords)
        profiling = self._max_full_descs_to_capture is not None  # profiling discards its captures
        if profiling or self is not runner.cudagraph_manager:
            own()
        else:
            full = {graph_key(d): d for rows in self._capture_descs.values() for d in rows if is_full(d)}
            instead(full, create_forward_fn, own)

    kind.capture = capture
    try:
        yield
    finally:
        kind.capture = original


def capture_rest(
    manager: Any, graphs: Mapping[str, Any], full: Mapping[str, Any], write: object, own: Callable[[], None]
) -> None:
    """Give the manager these graphs by key, and capture the others."""
    restored = {full[key]: graph for key, graph in graphs.items() if key in full}
    # Dispatch reads the list of captures again later.
    saved = {mode: list(rows) for mode, rows in manager._capture_descs.items()}
    for mode, rows in saved.items():
        manager._capture_descs[mode] = [row for row in rows if row not in restored]
    try:
        own()
    finally:
        manager._capture_descs.update(saved)
    manager.graphs.update(restored)
