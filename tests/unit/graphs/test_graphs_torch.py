"""PyTorch as a framework: names, segments and traces of a recorded snapshot, and the class that keeps graphs.

The class is tested on PyTorch's Python class over a replica of its C++ base class.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from replicas import extension, missing

from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.torch_framework import define_kept_class, pool_segments, trace_events

POOL = (0, 7)
ALLOC = {"action": "alloc", "size": 64}
SNAPSHOT = {
    "segments": [
        {"address": address, "total_size": 512, "segment_pool_id": pool}
        for address, pool in ((0x1000, POOL), (0x3000, POOL), (0x5000, (0, 0)))
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 0x3000, "size": 512},
            ALLOC | {"addr": 0x5000, "pool_id": (0, 0)},
            ALLOC | {"addr": 0x3000, "pool_id": POOL},
            {"action": "free_requested", "addr": 0x3000, "size": 64},
            {"action": "free_completed", "addr": 0x3000, "size": 64, "pool_id": POOL},
        ]
    ],
}


def test_segments_and_trace_of_a_pool() -> None:
    segments = [(r.symbol, r.base) for r in pool_segments(SNAPSHOT, POOL)]
    assert segments == [("pool:0", 0x1000), ("pool:1", 0x3000)]
    assert trace_events(SNAPSHOT, POOL) == [
        AllocationEvent("alloc", 0x5000, 64),
        AllocationEvent("alloc", 0x3000, 64, pool=True),
        AllocationEvent("free", 0x3000, 64, pool=True),
    ]


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_kept_graph_can_be_read_however_it_is_made(tmp_path_factory: pytest.TempPathFactory) -> None:
    from torch.cuda import graphs

    base = extension("cuda_graph", tmp_path_factory.mktemp("replica"))._CUDAGraph
    namespace = {**vars(graphs), "_CUDAGraph": base}
    exec(inspect.getsource(graphs.CUDAGraph), namespace)
    plain = namespace["CUDAGraph"]

    def captured(kind: Any, **keywords: Any) -> Any:
        graph = kind(**keywords)
        graph.capture_begin()
        graph.capture_end()
        return graph

    with pytest.raises(RuntimeError, match="keep_graph=true"):
        captured(plain).raw_cuda_graph()
    assert captured(plain, keep_graph=True).raw_cuda_graph()
    for keywords in ({}, {"keep_graph": False}, {"keep_graph": True}):
        graph = captured(define_kept_class(plain), **keywords)
        assert graph.raw_cuda_graph() and isinstance(graph, plain)
        graph.replay()
