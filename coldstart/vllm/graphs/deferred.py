"""Capture most CUDA graphs after the server is ready, one at a time between its steps (`serve --capture deferred`).

Before, vLLM captures the largest size, which sets the size of the graphs' memory pool, and the smallest ones, FIRST. The
other sizes are hidden from its dispatch, so that it runs such batches without their graph. Then each call of `advance` lets
vLLM's own `capture_model` run with a list of one size.

Invariants: all ranks dispatch alike, because a graph is shown by the call after its capture, and only if every rank captured
it. After a failed capture nothing more is captured, and the sizes that are left remain without graphs. A capture runs the
model with dummy inputs whose slots vLLM sets to -1, so it does not write the KV cache of running requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from coldstart.contract.graphs import CAPTURE_NEXT
from coldstart.system import timeline
from coldstart.vllm.graphs.hooks import log

ALL_BEFORE = "vLLM captures all CUDA graphs before the server is ready"
FIRST = (1, 2, 4, 8)
PATIENCE_S, PAUSE_S = 1.0, 0.01
"""Longest time to wait for a moment without requests before each capture, and the interval of looking, in seconds."""
Item = tuple[Any, Any]
"""Mode and batch descriptor of one graph."""


class Sizes:
    """Graphs of the runner in v1/worker/gpu, by its CudaGraphManager."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._all = manager, {key: list(rows) for key, rows in manager._candidates.items()}
        self._hidden = set[Any]()

    def items(self) -> list[Item]:
        """Return all graphs that vLLM would capture, in its order."""
        return [(mode, one) for mode, rows in self._manager._capture_descs.items() for one in rows]

    def hide(self, item: Item) -> None:
        """Make dispatch avoid the graph, and drop it if it was captured."""
        self._hidden.add(item[1])
        self._draw()
        self._manager.graphs.pop(item[1], None)

    def show(self, item: Item) -> None:
        self._hidden.discard(item[1])
        self._draw()

    def _draw(self) -> None:
        """Let dispatch see what is not hidden, in vLLM's order."""
        rows = {key: [d for d in every if d not in self._hidden] for key, every in self._all.items()}
        self._manager._candidates = rows

    @contextmanager
    def limited(self, items: Sequence[Item]) -> Iterator[None]:
        """Let vLLM capture only these graphs in the block."""
        saved, self._manager._capture_descs = self._manager._capture_descs, _by_mode(items)
        try:
            yield
        finally:
            self._manager._capture_descs = saved


def find_obstacle(runner: Any) -> str | None:
    """Return why the capture of a runner's graphs cannot be deferred."""
    config = runner.vllm_config
    if config.speculative_config is not None:
        return "a draft model has graphs of its own"
    if config.model_config.is_hybrid or config.model_config.is_attention_free:
        return "a dummy run can write the state of a Mamba layer"
    if config.model_config.is_multimodal_model:
        return "an encoder has graphs of its own"
    if getattr(runner, "cudagraph_manager", None) is None:
        return "this engine uses vLLM's first model runner"
    return None


class Deferral:
    """Capture session that captures the first sizes before the server is ready, and the others by `advance`."""

    def __init__(self) -> None:
        self._waiting, self._captured = list[Item](), list[Item]()
        self._sizes: Sizes | None = None
        self._own: Callable[[], Any] = lambda: None
        self.fallbacks: dict[str, str] = {}

    def run(self, runner: Any, own: Callable[[], Any]) -> Any:
        """Run vLLM's capture for the first sizes and hide the others; for all if they cannot be deferred."""
        if reason := find_obstacle(runner):
            self.fallbacks["*"] = f"{ALL_BEFORE}: {reason}"
            return own()
        self._sizes = found = Sizes(runner.cudagraph_manager)
        self._own = own
        first, self._waiting = divide(found.items())
        for item in self._waiting:
            found.hide(item)
        with found.limited(first):
            return own()

    def advance(self, agreed: bool) -> dict[str, Any]:
        """Show the last graph if all ranks captured it, else drop it and all others; capture the next one.

        Return the number of graphs that are left, the one just captured included, and why its capture failed.
        """
        if self._sizes is None:
            return {"left": 0, "error": None}
        for item in self._captured:
            (self._sizes.show if agreed else self._sizes.hide)(item)
        self._captured.clear()
        if not agreed:
            self._waiting.clear()
        error = self._capture(self._sizes, self._waiting.pop(0)) if self._waiting else None
        return {"left": len(self._waiting) + len(self._captured), "error": error}

    def _capture(self, sizes: Sizes, item: Item) -> str | None:
        with timeline.measure("capture a CUDA graph", track="engine"):
            try:
                with sizes.limited([item]):
                    self._own()
            except Exception as error:  # noqa: BLE001 - out of memory or an error of a kernel: the server runs on without it
                sizes.hide(item)
                log.warning("cannot capture %s: %s", item, error)
                return f"{type(error).__name__}: {error}"
        self._captured.append(item)
        return None


def divide(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Return the graphs to capture before the server is ready, in vLLM's order, and the others, small ones first.

    Load grows from one request on, so the small sizes are needed first. Both graphs of one size follow each other.
    """
    largest = {mode: max(one.num_tokens for one in rows) for mode, rows in _by_mode(items).items()}
    first = [item for item in items if item[1].num_tokens in (*FIRST, largest[item[0]])]
    later = [item for item in items if item not in first]
    return first, sorted(later, key=lambda item: (item[1].num_tokens, item[0].name))


async def capture_rest(engine: Any) -> None:
    """Let the workers of an engine that serves capture the graphs that are left. Log why not, and never fail.

    A capture runs between two steps. It waits for a moment without requests, up to PATIENCE_S, and after each one requests
    have the engine for as long as it took.
    """
    agreed, left = True, 1
    try:
        while left:
            await _wait_for_quiet(engine)
            began = time.monotonic()
            ranks = await engine.collective_rpc(CAPTURE_NEXT, args=(agreed,))
            left = max(rank["left"] for rank in ranks)
            errors = dict.fromkeys(rank["error"] for rank in ranks if rank["error"])
            if agreed and errors:
                # All ranks drop it in the next call: a size that one rank runs eagerly must be eager in all.
                agreed, left = False, 1
                log.warning("no more CUDA graphs are captured: %s", "; ".join(errors))
            await asyncio.sleep(time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 - the server serves without the graphs, or its engine has died
        log.warning("no more CUDA graphs are captured: %s: %s", type(error).__name__, error)


async def _wait_for_quiet(engine: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while engine.output_processor.has_unfinished_requests() and time.monotonic() < deadline:
        await asyncio.sleep(PAUSE_S)


def _by_mode(items: Sequence[Item]) -> dict[Any, list[Any]]:
    rows: dict[Any, list[Any]] = {}
    for mode, descriptor in items:
        rows.setdefault(mode, []).append(descriptor)
    return rows
