"""Every name of vLLM that this room uses, in one table.

Invariant: what the room uses and what stands here is the same (tests/unit/vllm/test_seams_table.py compares both by AST).
"""

from __future__ import annotations

from coldstart.vllm.seams import engine, graphs, scheduling
from coldstart.vllm.seams.seam import Seam

TABLE: tuple[Seam, ...] = (
    *engine.START,
    *engine.CONFIG,
    *engine.WORKER,
    *engine.OFFLINE,
    *engine.WEIGHTS,
    *scheduling.SCHEDULER,
    *scheduling.OFFLOAD,
    *scheduling.TAILS,
    *graphs.GRAPHS,
)


def seams_for(feature: str) -> list[Seam]:
    """What one feature needs."""
    return [seam for seam in TABLE if feature in seam.features]
