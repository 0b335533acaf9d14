"""Interface between the hooks and the restoring code, and the keys of graphs, shared by both runners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from coldstart.graphs.errors import GraphError, GraphRefusedError

log = logging.getLogger("vllm.coldstart.graphs")
Log = Callable[[str], None]


class GraphSource(Protocol):
    """Source of restored graphs for the hook, by graph key."""

    def usable(self, key: str) -> bool:
        """Return whether this graph is available without a capture."""

    def is_first(self, key: str) -> bool:
        """Return whether it is available before readiness; other graphs are built in the background."""

    def defer(self, key: str, show: Callable[[], None]) -> None:
        """Build it in the background; `show` is called, in another thread, once it can be replayed."""

    def replayable(self, key: str) -> Any:
        """Return an object with replay(). Raises GraphError."""

    def output(self, key: str) -> Any:
        """Return the output of the captured callable, over restored memory. Raises GraphError."""

    def attributes(self) -> Mapping[str, Any]:
        """Return the tensors that capture would have created on the manager, such as hidden_states."""


def graph_key(descriptor: Any, mode: str) -> str:
    """Return the graph key of a batch descriptor of either runner: mode and every field that is not a default."""
    fields = getattr(descriptor, "__dataclass_fields__", None) or dict.fromkeys(descriptor._fields)
    skip = ("cg_mode",)
    parts = [f"{n}={getattr(descriptor, n)}" for n in fields if n not in skip and getattr(descriptor, n)]
    return f"{mode}:" + ",".join(parts)


def attempt(graphs: dict[Any, Any], descriptor: Any, make: Callable[[], Any], key: str, log: Log) -> bool:
    """Store the result of `make` under the descriptor. Return False, and log the reason, if it raises."""
    try:
        graphs[descriptor] = make()
    except GraphError as error:
        log(f"{key} is captured normally: {error}")
        return False
    return True


def refuse_unsupported(runner: Any) -> None:
    """Raise GraphRefusedError for an engine of several ranks, or one that captures into the pool of vLLM's sleep mode."""
    parallel = runner.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise GraphRefusedError("graphs of several ranks contain collectives, which cannot be restored")
    if runner.vllm_config.use_cumem_cudagraph_pool:
        raise GraphRefusedError(
            "with --sleep-mode-offload-cudagraph vLLM captures graphs into the memory pool of its sleep mode, "
            "which is not recorded"
        )
