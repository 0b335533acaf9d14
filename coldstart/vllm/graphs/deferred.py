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
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from coldstart.contract.graphs import CAPTURE_NEXT
from coldstart.system import timeline
from coldstart.vllm import late, sleep
from coldstart.vllm.engine import collection
from coldstart.vllm.graphs.hooks import log

ALL_BEFORE = "vLLM captures all CUDA graphs before the server is ready"
FIRST_SIZES = (1, 2, 4, 8)
QUIET_TIMEOUT_S, POLL_S, ASLEEP_POLL_S = 1.0, 0.01, 1.0
"""Maximum wait for an idle engine before each capture, and polling intervals, the last for a sleeping engine, in seconds."""
CaptureItem = tuple[Any, Any]
"""Mode and batch descriptor of one graph."""


def find_incompatibility(runner: Any) -> str | None:
    """Return the reason why the graph capture of this runner cannot be deferred, or None if it can."""
    config = runner.vllm_config
    model, monitor = config.model_config, config.observability_config.jit_monitor_mode
    reasons = {
        "the draft model has its own graphs": config.speculative_config is not None,
        "a capture unloads the LoRA adapters of requests": config.lora_config is not None,
        "engines take their steps together": config.parallel_config.data_parallel_size > 1,
        "--jit-monitor-mode=error refuses kernels of sizes without a graph": monitor == "error",
        "a dummy run can write the state of a Mamba layer": model.is_hybrid or model.is_attention_free,
        "the multimodal encoder has its own graphs": model.is_multimodal_model,
        "this engine uses vLLM's model runner V1": getattr(runner, "cudagraph_manager", None) is None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class DeferredCapture:
    """Limits vLLM's CudaGraphManager to the first sizes before the server is ready, and one more per `capture_next` call."""

    def __init__(self) -> None:
        self._waiting, self._captured, self._hidden = list[CaptureItem](), list[CaptureItem](), set[Any]()
        self._manager: Any = None
        self._candidates: dict[Any, list[Any]] = {}
        self._own: Callable[[], Any] = lambda: None
        self.fallbacks: dict[str, str] = {}

    def run(self, runner: Any, capture: Callable[[], Any]) -> Any:
        """Run vLLM's `capture` for the first sizes, and hide the later sizes. If deferral is impossible, capture all."""
        if reason := find_incompatibility(runner):
            self.fallbacks["*"] = f"{ALL_BEFORE}: {reason}"
            return capture()
        self._manager, self._own = runner.cudagraph_manager, capture
        self._candidates = self._manager._candidates
        every = self._manager._capture_descs.items()
        first, self._waiting = split_items([(mode, one) for mode, rows in every for one in rows])
        self._hide({one for _, one in self._waiting})
        return self._capture(first)

    def capture_next(self, all_captured: bool) -> dict[str, Any]:
        """Make the last captured graph visible if all ranks captured it, else drop it and all later graphs. Capture the next.

        Return `left`, the number of graphs that are not visible yet, and `error`, the reason why a capture failed. If the
        engine is `asleep`, do nothing, because a capture would access unmapped memory.
        """
        report: dict[str, Any] = {"error": None}
        if sleep.is_memory_unmapped():
            report["asleep"] = True
        elif self._manager is not None:
            if not all_captured:
                self._waiting.clear()
            self._hide(self._hidden - {one for _, one in self._captured if all_captured})
            self._captured.clear()
            if self._waiting:
                report["error"] = self._capture_beside_requests(self._waiting.pop(0))
        return {"left": len(self._waiting) + len(self._captured), **report}

    def _hide(self, hidden: set[Any]) -> None:
        """Let vLLM dispatch all graphs except these, in vLLM's order. Delete those of them that were captured."""
        self._hidden, every = hidden, self._candidates.items()
        self._manager._candidates = {key: [one for one in rows if one not in hidden] for key, rows in every}
        for one in hidden:
            self._manager.graphs.pop(one, None)

    def _capture(self, items: Sequence[CaptureItem]) -> Any:
        """Run vLLM's `capture` for these graphs only."""
        with late.replace_attribute(self._manager, "_capture_descs", _by_mode(items)):
            return self._own()

    def _capture_beside_requests(self, item: CaptureItem) -> str | None:
        try:
            with timeline.measure("capture a CUDA graph", track="engine"), _protect_requests():
                self._capture([item])
        except Exception as error:  # noqa: BLE001 - out of memory or an error of a kernel: the server runs on without it
            self._hide(self._hidden)
            log.warning("cannot capture %s: %s", item, error)
            return f"{type(error).__name__}: {error}"
        self._captured.append(item)
        return None


@contextmanager
def _protect_requests() -> Iterator[None]:
    """Make vLLM's capture, which expects an engine without requests, safe beside them while this block runs.

    Garbage is not collected: vLLM would unfreeze the heap, and scan it twice for each graph. Only the capturing thread is kept
    from calls that a capture forbids, because other threads wait for the outputs of steps. The device is idle before and
    after: the warm-up writes to buffers that a step may still read, and vLLM leaves its capture stream without waiting.
    """
    import torch

    capture = functools.partial(torch.cuda.graph, capture_error_mode="thread_local")
    torch.cuda.synchronize()
    try:
        with late.replace_attribute(torch.cuda, "graph", capture), collection.skip_collections():
            yield
    finally:
        torch.cuda.synchronize()


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
