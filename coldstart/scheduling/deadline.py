"""Order of requests by deadline: the arrival plus `factor` times the prefill time of the uncached prompt.

Invariant: only requests that arrive less than `slack_s` seconds after a request can pass it, as long as clients give both the
same priority. So no request starves, and a short prompt waits less for long ones. No output length is predicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from coldstart.scheduling.profile import IterationProfile

SPAN_US = 1 << 52
"""Microseconds between two priorities of clients, so that any deadline before the year 2112 fits between them."""
MOST_PRIORITY = 2047
"""Largest client's priority that fits into 64 bits with its sign; a larger one counts as this one."""
CHUNK_TOKENS = 128


class RecentPrefixes:
    """Prefixes of the latest prompts in whole chunks: an estimate of vLLM's prefix cache outside of its engine."""

    def __init__(self, tokens: int) -> None:
        self._chunks, self._most = OrderedDict[int, None](), tokens // CHUNK_TOKENS

    def add(self, prompt: Sequence[int]) -> int:
        """Add a prompt, and return the number of its first tokens that earlier prompts had in common with it."""
        prefix = cached = 0
        # The last token is always computed.
        for end in range(CHUNK_TOKENS, len(prompt), CHUNK_TOKENS):
            prefix = hash((prefix, *prompt[end - CHUNK_TOKENS : end]))
            if prefix in self._chunks and cached == end - CHUNK_TOKENS:
                cached = end
            self._chunks[prefix] = None
            self._chunks.move_to_end(prefix)
        while len(self._chunks) > self._most:
            self._chunks.popitem(last=False)
        return cached


class Deadlines:
    """Deadlines as priorities of vLLM's `--scheduling-policy priority`, which serves the smallest first.

    With `slo_s`, no deadline is later than the last moment at which a prompt alone still gets its first token within `slo_s`
    seconds. `cache_tokens` is the size of the prefix cache in tokens, 0 without one.
    """

    def __init__(
        self, profile: IterationProfile, factor: float, slo_s: float | None = None, cache_tokens: int = 0
    ) -> None:
        self.profile, self.factor, self.slo_s = profile, factor, slo_s
        self._recent = RecentPrefixes(cache_tokens)

    def slack_s(self, tokens: int) -> float:
        """Return the seconds between arrival and deadline of a prompt with `tokens` uncached tokens."""
        prefill_s = self.profile.prefill(tokens)
        slack_s = self.factor * prefill_s
        return slack_s if self.slo_s is None else min(slack_s, max(0.0, self.slo_s - prefill_s))

    def priority(self, arrival_s: float, prompt: Sequence[int], given: int = 0) -> int:
        """Return the priority of a request that arrives now: its deadline in whole microseconds, rounded down.

        Requests with different priorities `given` by clients keep the order of those; deadlines order the others.
        """
        deadline_s = arrival_s + self.slack_s(len(prompt) - self._recent.add(prompt))
        classed = max(-MOST_PRIORITY, min(MOST_PRIORITY, given))
        return classed * SPAN_US + max(0, min(SPAN_US - 1, int(deadline_s * 1e6)))
