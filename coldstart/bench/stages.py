"""The five stages of a cold start after MEDUSA (section 2.2), in seconds, from the spans of one start.

A stage lasts as long as at least one of its spans, so that spans within or beside each other do not count twice. A stage
that a start mode skips takes 0 s. Compilation, which the paper does not have, counts where vLLM does it: while it sizes the
KV cache, or while it warms up and captures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coldstart.system.timeline import Span

SPANS: Mapping[str, frozenset[str]] = {
    "structure": frozenset({"construct model"}),
    "weights": frozenset({"load the model", "load weights", "read tensors", "wake the engine"}),
    "tokenizer": frozenset({"load the tokenizer"}),
    "KV": frozenset({"compile the model or size the KV cache", "allocate the KV cache"}),
    "capture": frozenset({"compile or warm up", "warm up", "restore compiled forward"}),
}
REST = "rest"
STAGES = (*SPANS, REST)


def measure(spans: Iterable[Span], begin_s: float, end_s: float) -> dict[str, float]:
    """Return the seconds of each stage and of the rest between launch and first token; empty without any reported span.

    The creation of the model is part of vLLM's step that loads its weights, and counts as structure alone.
    """
    spans = list(spans)
    if not spans:
        return {}
    known = {
        stage: [(max(s.start_s, begin_s), min(s.end_s, end_s)) for s in spans if s.name in names]
        for stage, names in SPANS.items()
    }
    both = _length([*known["structure"], *known["weights"]])
    seconds = {stage: _length(found) for stage, found in known.items()}
    seconds["weights"] = both - seconds["structure"]
    covered = _length([interval for found in known.values() for interval in found])
    return seconds | {REST: end_s - begin_s - covered}


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
