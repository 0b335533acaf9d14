"""Divide a cold start into the five stages of MEDUSA (section 2.2), from the spans that the start reported.

The duration of a stage is the length of the union of its spans, so overlapping spans count once. A skipped stage takes
0 s. Compilation, which the paper does not cover, counts in the stage in which vLLM compiles: `KV` or `capture`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coldstart.system.timeline import Span

STAGE_SPANS: Mapping[str, frozenset[str]] = {
    "structure": frozenset({"construct model"}),
    "weights": frozenset({"load the model", "load weights", "read tensors", "wake the engine"}),
    "tokenizer": frozenset({"load the tokenizer"}),
    "KV": frozenset({"compile the model or size the KV cache", "allocate the KV cache"}),
    "capture": frozenset({"compile or warm up", "warm up", "restore compiled forward"}),
}
REST = "rest"
STAGES = (*STAGE_SPANS, REST)


def measure_stages(spans: Iterable[Span], begin_s: float, end_s: float) -> dict[str, float]:
    """Return the seconds of each stage and of the rest between `begin_s` and `end_s`; empty without spans.

    vLLM constructs the model within its weight-loading span; that time counts only as `structure`.
    """
    spans = list(spans)
    if not spans:
        return {}
    intervals_by_stage = {
        stage: [(max(s.start_s, begin_s), min(s.end_s, end_s)) for s in spans if s.name in names]
        for stage, names in STAGE_SPANS.items()
    }
    structure_and_weights_s = _union_length(
        [*intervals_by_stage["structure"], *intervals_by_stage["weights"]]
    )
    seconds = {stage: _union_length(intervals) for stage, intervals in intervals_by_stage.items()}
    seconds["weights"] = structure_and_weights_s - seconds["structure"]
    covered = _union_length([interval for intervals in intervals_by_stage.values() for interval in intervals])
    return seconds | {REST: end_s - begin_s - covered}


def _union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
