"""The pure parts of the PyTorch framework: names, pool segments and traces from a recorded snapshot."""

from __future__ import annotations

import pytest

from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.torch_framework import (
    pool_segments,
    tensor_regions,
    trace_events,
)

POOL = (0, 7)
SNAPSHOT = {
    "segments": [
        {"address": 0x1000, "total_size": 512, "segment_pool_id": (0, 7)},
        {"address": 0x3000, "total_size": 512, "segment_pool_id": (0, 7)},
        {"address": 0x5000, "total_size": 512, "segment_pool_id": (0, 0)},
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 0x3000, "size": 512},
            {"action": "alloc", "addr": 0x5000, "size": 64, "pool_id": (0, 0)},
            {"action": "alloc", "addr": 0x3000, "size": 64, "pool_id": (0, 7)},
            {"action": "segment_alloc", "addr": 0x1000, "size": 512},
            {"action": "free_requested", "addr": 0x3000, "size": 64},
            {"action": "free_completed", "addr": 0x3000, "size": 64, "pool_id": (0, 7)},
        ]
    ],
}


def test_segments_of_one_pool() -> None:
    assert [(r.symbol, r.base) for r in pool_segments(SNAPSHOT, POOL)] == [
        ("pool:0", 0x1000),
        ("pool:1", 0x3000),
    ]


def test_trace_events() -> None:
    assert trace_events(SNAPSHOT, POOL) == [
        AllocationEvent("alloc", 0x5000, 64),
        AllocationEvent("alloc", 0x3000, 64, pool=True),
        AllocationEvent("free", 0x3000, 64, pool=True),
    ]


@pytest.mark.slow
def test_tied_weights_have_one_storage() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(4, 4, bias=False)
    module.register_buffer("part", module.weight.data[1:])
    regions = tensor_regions({"param:weight": module.weight.data, "buffer:part": module.part})
    assert [r.symbol for r in regions] == ["param:weight", "buffer:part"]
    assert regions[0].base == regions[1].base and regions[0].size == 64
