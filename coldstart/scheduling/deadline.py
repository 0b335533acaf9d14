"""Order requests by deadline: the arrival time plus `factor` times the prefill time of the uncached prompt.

Invariant: a request can overtake an earlier request of equal client priority only if it arrives within the slack
(`slack_s`) of the earlier request. So no request starves, and short prompts wait less for long prompts. Output lengths are
not predicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from coldstart.scheduling.profile import IterationProfile

PRIORITY_SPAN_US = 1 << 52
"""Distance between two client priorities in microseconds; any deadline before the year 2112 is smaller."""
MAX_CLIENT_PRIORITY = 2047
"""Largest client priority whose encoding fits into a signed 64-bit integer; larger ones are clamped."""
CHUNK_TOKENS = 128


class RecentPrefixes:
    """Estimate of which prompt prefixes vLLM has cached, from the recent prompts in chunks of CHUNK_TOKENS tokens."""

    def __init__(self, tokens: int) -> None:
        self._chunks, self._max_chunks = OrderedDict[int, None](), tokens // CHUNK_TOKENS

    def add(self, prompt: Sequence[int]) -> int:
        """Add a prompt, and return the length in tokens of the prefix that it shares with earlier prompts."""
        prefix = cached = 0
        # The last token is always computed.
        for end in range(CHUNK_TOKENS, len(prompt), CHUNK_TOKENS):
            prefix = hash((prefix, *prompt[end - CHUNK_TOKENS : end]))
            if prefix in self._chunks and cached == end - CHUNK_TOKENS:
                cached = end
            self._chunks[prefix] = None
            self._chunks.move_to_end(prefix)
        while len(self._chunks) > self._max_chunks:
            self._chunks.popitem(last=False)
        return cached


class DeadlinePolicy:
    """Deadlines encoded as priorities for vLLM's `--scheduling-policy priority`, which serves the smallest value first.

    With `slo_s`, a deadline is no later than the latest start of the prefill that meets a TTFT of `slo_s` seconds.
    `cache_tokens` is the size of the prefix cache in tokens, or 0 if there is none.
    """

    def __init__(
        self, profile: IterationProfile, factor: float, slo_s: float | None = None, cache_tokens: int = 0
    ) -> None:
        self.profile, self.factor, self.slo_s = profile, factor, slo_s
        self._recent = RecentPrefixes(cache_tokens)

    def compute_slack_s(self, tokens: int) -> float:
        """Return the time in seconds between the arrival and the deadline of a prompt with `tokens` uncached tokens."""
        prefill_s = self.profile.prefill(tokens)
        slack_s = self.factor * prefill_s
        return slack_s if self.slo_s is None else min(slack_s, max(0.0, self.slo_s - prefill_s))

    def priority(self, arrival_s: float, prompt: Sequence[int], client_priority: int = 0) -> int:
        """Return vLLM's priority for a new request, which encodes its deadline in microseconds, rounded down.

        `client_priority` takes precedence: deadlines order only requests with equal client priorities.
        """
        deadline_s = arrival_s + self.compute_slack_s(len(prompt) - self._recent.add(prompt))
        clamped = max(-MAX_CLIENT_PRIORITY, min(MAX_CLIENT_PRIORITY, client_priority))
        return clamped * PRIORITY_SPAN_US + max(0, min(PRIORITY_SPAN_US - 1, int(deadline_s * 1e6)))
