"""Garbage is collected once when an engine is warm, and while its memory is profiled."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.worker.cpu_worker import CPUWorker

from coldstart.vllm.engine import collection
from coldstart.vllm.engine.worker import ColdWorker


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The collections and freezes that really ran."""
    ran: list[str] = []
    for name in collection._OWN:
        monkeypatch.setitem(collection._OWN, name, lambda *_, name=name: ran.append(name))
        monkeypatch.setattr(gc, name, collection._OWN[name])
    yield ran
    gc.enable()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own core and GPU worker, with the hooks; undone afterwards."""
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker

    @contextlib.contextmanager
    def memory_profiling() -> Iterator[str]:
        gc.collect()
        yield "profile"
        gc.collect()

    monkeypatch.setattr(core, "freeze_gc_heap", core.freeze_gc_heap)
    monkeypatch.setattr(gpu_worker, "freeze_gc_heap", gpu_worker.freeze_gc_heap)
    monkeypatch.setattr(gpu_worker, "memory_profiling", memory_profiling)
    return gpu_worker


def test_no_collection_runs_until_the_worker_is_warm(worker: Any, collections: list[str]) -> None:
    collection.postpone_in_process()
    assert collections == ["freeze"] and not gc.isenabled()
    collections.clear()
    from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

    with freeze_gc_for_cudagraph_capture():
        gc.collect(2)
    assert collections == []
    worker.freeze_gc_heap()
    assert collections == ["collect", "freeze"] and gc.isenabled()


def test_a_warm_engine_freezes_as_vllm_does(worker: Any, collections: list[str]) -> None:
    collection.postpone_in_process()
    worker.freeze_gc_heap()
    collections.clear()
    from vllm.v1.engine import core

    core.freeze_gc_heap()
    assert collections == ["collect"] * 3 + ["freeze"]


@pytest.mark.parametrize("starting", [True, False])
def test_only_a_process_that_starts_passes_it_on_to_its_children(
    worker: Any, collections: list[str], monkeypatch: pytest.MonkeyPatch, starting: bool
) -> None:
    after: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: after.append(after_in_child))
    collection.postpone_in_children()
    if starting:
        gc.disable()
    (in_child,) = after
    in_child()
    assert gc.isenabled() is not starting
    gc.collect()
    assert collections == ([] if starting else ["collect"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_warm_rank_collects_in_its_own_process(
    worker: Any, collections: list[str], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", lambda _: None)
    rank = ColdWorker.__new__(ColdWorker)
    rank.parallel_config = SimpleNamespace(world_size=ranks)
    collection.postpone_in_process()
    rank.compile_or_warm_up_model()
    assert gc.isenabled() is (ranks > 1)
