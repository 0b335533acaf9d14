"""Hook the capture of CUDA graphs by vLLM's CudaGraphManager.

A model runner receives the restored full graphs, and skips warm-up and capture for exactly their batch descriptors. All
other descriptors and managers are captured as usual. vLLM only calls .replay() on the restored graphs. Piecewise graphs are
not restored, because each piece reads memory that the previous piece wrote.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coldstart.graphs.errors import GraphRefusedError
from coldstart.vllm import compat, late

log = logging.getLogger("vllm.coldstart.graphs")
MODULE = "vllm.v1.worker.gpu.cudagraph_utils"


def require_support() -> None:
    """Raise GraphRefusedError if graphs were not tested with this vLLM version. This does not import vLLM."""
    if reason := compat.find_unsupported_reason("graphs"):
        raise GraphRefusedError(reason)


def check_runner(runner: Any) -> None:
    """Raise GraphRefusedError if the graphs of this runner's engine cannot be recorded or restored."""
    require_support()
    parallel = runner.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise GraphRefusedError("cannot restore graphs of several ranks: they contain collectives")
    if getattr(runner, "use_aux_hidden_state_outputs", False):
        raise GraphRefusedError("cannot record graphs: a draft model reads outputs of intermediate layers")
    if runner.vllm_config.use_cumem_cudagraph_pool:
        raise GraphRefusedError(
            "cannot record graphs with --sleep-mode-offload-cudagraph: they are captured into the sleep mode's pool"
        )
    if (manager := getattr(runner, "cudagraph_manager", None)) is None:
        raise GraphRefusedError("cannot record graphs of vLLM's model runner V1, which this engine uses")
    if getattr(manager, "ubatch_runner", None) is not None:
        raise GraphRefusedError("cannot restore graphs: vLLM writes microbatch inputs only for a capture")


def build_graph_key(descriptor: Any) -> str:
    """Return the graph key of a batch descriptor: its mode and all fields that differ from their defaults."""
    names = [n for n in descriptor.__dataclass_fields__ if n != "cg_mode" and getattr(descriptor, n)]
    return f"{descriptor.cg_mode.name}:" + ",".join(f"{n}={getattr(descriptor, n)}" for n in names)


def is_full_graph(descriptor: Any) -> bool:
    """Return whether the descriptor's graph covers the full forward pass."""
    return bool(descriptor.cg_mode.name == "FULL")


CaptureReplacement = Callable[[Mapping[str, Any], Callable[..., Any], Callable[[], None]], None]
"""Function that replaces a capture. It receives the descriptors of all full graphs by key, vLLM's function that writes the
inputs of a descriptor, and vLLM's own capture."""


@contextlib.contextmanager
def replace_capture(runner: Any, replacement: CaptureReplacement) -> Iterator[None]:
    """Call `replacement` instead of this runner's graph capture while this block runs.

    Only the runner's own manager is affected: the managers of draft models inherit its method and have the same keys.

    Raises:
        GraphRefusedError: This vLLM lacks the method, and nothing was patched.
    """
    kind: Any = getattr(sys.modules.get(MODULE), "CudaGraphManager", None)
    original = getattr(kind, "capture", None)
    if original is None:
        raise GraphRefusedError("cannot hook graph capture: this vLLM has no CudaGraphManager.capture")

    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Any, *arguments: Any, **keywords: Any) -> None:
        own = functools.partial(original, self, create_forward_fn, *arguments, **keywords)
        profiling = self._max_full_descs_to_capture is not None  # profiling discards its captures
        if profiling or self is not runner.cudagraph_manager:
            own()
        else:
            listed = (d for rows in self._capture_descs.values() for d in rows)
            replacement({build_graph_key(d): d for d in listed if is_full_graph(d)}, create_forward_fn, own)

    with late.replace_attribute(kind, "capture", capture):
        yield


def capture_unrestored(
    manager: Any,
    graphs: Mapping[str, Any],
    full: Mapping[str, Any],
    write: object,
    capture: Callable[[], None],
) -> None:
    """Add the restored `graphs` to the manager, and capture all other graphs. `full` maps graph keys to batch descriptors."""
    restored = {full[key]: graph for key, graph in graphs.items() if key in full}
    every = manager._capture_descs.items()  # vLLM's dispatch reads these lists again later
    others = {mode: [row for row in rows if row not in restored] for mode, rows in every}
    with late.replace_attribute(manager, "_capture_descs", others):
        capture()
    manager.graphs.update(restored)
