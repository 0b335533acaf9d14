"""Capture most CUDA graphs after the server is ready, one at a time between its steps (`serve --capture deferred`).

Before the server is ready, vLLM captures FIRST_SIZES and the largest size, which determines the size of the graphs' memory
pool. The other sizes are hidden from vLLM's dispatch, so their batches run without a graph. Afterwards, each call of
`capture_next` runs vLLM's own `capture_model` for one size.

Invariants: all ranks dispatch alike, because a graph becomes visible in the call after its capture, and only if every
rank captured it. After a failed capture, no further sizes are captured, and their batches run without graphs. A capture
runs the model with dummy inputs whose KV slots vLLM sets to -1, so it does not write to the KV cache of requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from coldstart.contract.graphs import CAPTURE_NEXT
from coldstart.system import timeline
from coldstart.vllm import sleep
from coldstart.vllm.graphs.hooks import log

ALL_BEFORE = "vLLM captures all CUDA graphs before the server is ready"
FIRST_SIZES = (1, 2, 4, 8)
QUIET_TIMEOUT_S, POLL_S, ASLEEP_POLL_S = 1.0, 0.01, 1.0
"""Maximum wait for an idle engine before each capture, and polling intervals, the last for a sleeping engine, in seconds."""
CaptureItem = tuple[Any, Any]
"""Mode and batch descriptor of one graph."""


class CaptureList:
    """List of the graphs that vLLM's CudaGraphManager (v1/worker/gpu) captures and dispatches."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._all = manager, {key: list(rows) for key, rows in manager._candidates.items()}
        self._hidden = set[Any]()

    def list_items(self) -> list[CaptureItem]:
        """Return all graphs that vLLM would capture, in vLLM's order."""
        return [(mode, one) for mode, rows in self._manager._capture_descs.items() for one in rows]

    def hide(self, item: CaptureItem) -> None:
        """Exclude a graph from dispatch, and delete it if it was captured."""
        self._hidden.add(item[1])
        self._draw()
        self._manager.graphs.pop(item[1], None)

    def show(self, item: CaptureItem) -> None:
        self._hidden.discard(item[1])
        self._draw()

    def _draw(self) -> None:
        """Let vLLM dispatch all graphs that are not hidden, in vLLM's order."""
        rows = {key: [d for d in every if d not in self._hidden] for key, every in self._all.items()}
        self._manager._candidates = rows

    @contextmanager
    def limit_capture(self, items: Sequence[CaptureItem]) -> Iterator[None]:
        """Make vLLM capture only `items` while this block runs."""
        saved, self._manager._capture_descs = self._manager._capture_descs, _by_mode(items)
        try:
            yield
        finally:
            self._manager._capture_descs = saved


def find_incompatibility(runner: Any) -> str | None:
    """Return the reason why the graph capture of this runner cannot be deferred, or None if it can."""
    config = runner.vllm_config
    if config.speculative_config is not None:
        return "the draft model has its own graphs"
    if config.model_config.is_hybrid or config.model_config.is_attention_free:
        return "a dummy run can write the state of a Mamba layer"
    if config.model_config.is_multimodal_model:
        return "the multimodal encoder has its own graphs"
    if getattr(runner, "cudagraph_manager", None) is None:
        return "this engine uses vLLM's model runner V1"
    return None


class DeferredCapture:
    """Capture session that captures the first sizes before the server is ready, and one more size per `capture_next` call."""

    def __init__(self) -> None:
        self._waiting, self._captured = list[CaptureItem](), list[CaptureItem]()
        self._sizes: CaptureList | None = None
        self._own: Callable[[], Any] = lambda: None
        self.fallbacks: dict[str, str] = {}

    def run(self, runner: Any, capture: Callable[[], Any]) -> Any:
        """Run vLLM's `capture` for the first sizes, and hide the later sizes. If deferral is impossible, capture all."""
        if reason := find_incompatibility(runner):
            self.fallbacks["*"] = f"{ALL_BEFORE}: {reason}"
            return capture()
        self._sizes = found = CaptureList(runner.cudagraph_manager)
        self._own = capture
        first, self._waiting = split_items(found.list_items())
        for item in self._waiting:
            found.hide(item)
        with found.limit_capture(first):
            return capture()

    def capture_next(self, all_captured: bool) -> dict[str, Any]:
        """Make the last captured graph visible if all ranks captured it, else drop it and all later graphs. Capture the next.

        Return `left`, the number of graphs that are not visible yet, and `error`, the reason why a capture failed. If the
        engine is `asleep`, do nothing, because a capture would access unmapped memory.
        """
        if self._sizes is None:
            return {"left": 0, "error": None}
        if sleep.is_memory_unmapped():
            return {"left": len(self._waiting) + len(self._captured), "error": None, "asleep": True}
        for item in self._captured:
            (self._sizes.show if all_captured else self._sizes.hide)(item)
        self._captured.clear()
        if not all_captured:
            self._waiting.clear()
        error = self._capture(self._sizes, self._waiting.pop(0)) if self._waiting else None
        return {"left": len(self._waiting) + len(self._captured), "error": error}

    def _capture(self, sizes: CaptureList, item: CaptureItem) -> str | None:
        with timeline.measure("capture a CUDA graph", track="engine"):
            try:
                with sizes.limit_capture([item]):
                    self._own()
            except Exception as error:  # noqa: BLE001 - out of memory or an error of a kernel: the server runs on without it
                sizes.hide(item)
                log.warning("cannot capture %s: %s", item, error)
                return f"{type(error).__name__}: {error}"
        self._captured.append(item)
        return None


def split_items(items: Sequence[CaptureItem]) -> tuple[list[CaptureItem], list[CaptureItem]]:
    """Return the graphs to capture before the server is ready, in vLLM's order, and the later ones, smallest first.

    Batches are small at first, so small sizes are needed first. All graphs of one size are captured one after another.
    """
    largest = {mode: max(one.num_tokens for one in rows) for mode, rows in _by_mode(items).items()}
    first = [item for item in items if item[1].num_tokens in (*FIRST_SIZES, largest[item[0]])]
    later = [item for item in items if item not in first]
    return first, sorted(later, key=lambda item: (item[1].num_tokens, item[0].name))


async def capture_remaining(engine: Any) -> None:
    """Make the workers of a serving engine capture their remaining graphs. Log errors, and never raise them.

    Each capture runs between two steps. It waits for an idle engine for up to QUIET_TIMEOUT_S seconds, and for a sleeping
    engine until it is awake. After a capture, requests can run without captures for as long as the capture took.
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
                # In the next call all ranks drop the graph, because all ranks must dispatch alike.
                agreed, left = False, 1
                log.warning("cannot capture more CUDA graphs: %s", "; ".join(errors))
            is_asleep = any("asleep" in rank for rank in ranks)
            await asyncio.sleep(ASLEEP_POLL_S if is_asleep else time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 - the server serves without the graphs, or its engine has died
        log.warning("cannot capture more CUDA graphs: %s: %s", type(error).__name__, error)


async def _wait_for_quiet(engine: Any) -> None:
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    while engine.output_processor.has_unfinished_requests() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)


def _by_mode(items: Sequence[CaptureItem]) -> dict[Any, list[Any]]:
    rows: dict[Any, list[Any]] = {}
    for mode, descriptor in items:
        rows.setdefault(mode, []).append(descriptor)
    return rows
