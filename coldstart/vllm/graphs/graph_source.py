"""What the hooks ask of the restoring side, and how a graph is called: the words that both runners share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from coldstart.graphs.errors import GraphError, GraphRefusedError

log = logging.getLogger("vllm.coldstart.graphs")
Log = Callable[[str], None]


class GraphSource(Protocol):
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


def attempt(graphs: dict[Any, Any], descriptor: Any, make: Callable[[], Any], key: str, log: Log) -> bool:
    """Put what `make` gives under the descriptor; False, and a line in the log, where it cannot be had."""
    try:
        graphs[descriptor] = make()
    except GraphError as error:
        log(f"{key} is captured normally: {error}")
        return False
    return True


def refuse_parallel(runner: Any) -> None:
    """Raises Refused for an engine of several ranks."""
    parallel = runner.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise GraphRefusedError("graphs of several ranks hold collectives")
