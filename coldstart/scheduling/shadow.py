"""Predict how another scheduling order would serve the traffic of a running server (`--shadow`).

Recently finished requests are replayed in both orders on a queue model: an engine with a batch limit, a token budget and
KV memory, whose iteration times come from the profile. Prompts are computed in chunks, in the same iterations as decoding
requests. When memory is full, the request that is last in the order is preempted and recomputed, as in vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf
from statistics import fmean
from typing import NamedTuple

from coldstart.scheduling.profile import CONTEXT_SHARE, IterationProfile

MIN_REQUESTS, MAX_REQUESTS = 50, 500
"""Minimum and maximum number of recent requests that a prediction replays."""


class FinishedRequest(NamedTuple):
    """Finished request: its arrival time and TTFT (time to first token) in seconds, and its token counts."""

    arrival_s: float
    prompt: int
    cached: int
    output: int
    ttft_s: float = 0.0


class ReplayedTimes(NamedTuple):
    """TTFT and latency of each replayed request, in seconds."""

    ttft_s: list[float]
    latency_s: list[float]


class Prediction(NamedTuple):
    """Predicted gains: times in the server's order divided by times in the other order, which is faster if a gain is above 1.

    `ttft_gain` compares the mean TTFT, and `longest_gain` the mean latency of the tenth of requests with the longest
    outputs. `model_ratio` is the error of the queue model: the replayed mean TTFT in the server's order divided by the
    measured mean TTFT.
    """

    requests: int
    ttft_gain: float
    longest_gain: float
    model_ratio: float


SortKey = Callable[[FinishedRequest], float]
"""Function that returns the sort key of a request; the request with the smallest key is served first."""


@dataclass(frozen=True, slots=True)
class QueueSimulator:
    """Queue model of an engine. Each context token of a decoding request adds `context_s` seconds to an iteration."""

    profile: IterationProfile
    batch: int
    token_budget: int
    kv_capacity_tokens: int
    context_s: float | None = None

    def replay(self, requests: Sequence[FinishedRequest], key: SortKey) -> ReplayedTimes:
        """Replay requests, which must be in order of arrival. A request that exceeds the KV memory runs alone."""
        run = QueueReplay(self, requests, key)
        while run.step():
            pass
        ttft_s, latency_s = (
            [moment_s - request.arrival_s for moment_s, request in zip(moments, requests, strict=True)]
            for moments in (run.first_token_at_s, run.end_at_s)
        )
        return ReplayedTimes(ttft_s, latency_s)


class ShadowPredictor:
    """Predictor that replays recently finished requests in arrival order and in deadline order."""

    def __init__(
        self, model: QueueSimulator, slack_s: Callable[[int], float], *, serves_deadlines: bool
    ) -> None:
        self._model, self._slack_s, self._serves_deadlines = model, slack_s, serves_deadlines
        self._requests = deque[FinishedRequest](maxlen=MAX_REQUESTS)

    def add(self, request: FinishedRequest) -> None:
        """Add a finished request."""
        self._requests.append(request)

    def predict(self) -> Prediction | None:
        """Predict the gain if the server had used the other order (arrival or deadline) for the recent requests.

        Return None if there are fewer than MIN_REQUESTS.
        """
        requests = sorted(self._requests)
        if len(requests) < MIN_REQUESTS:
            return None
        own, other = (
            self._model.replay(requests, self._deadline_key if deadlines else self._arrival_key)
            for deadlines in (self._serves_deadlines, not self._serves_deadlines)
        )
        longest = sorted(range(len(requests)), key=lambda number: requests[number].output)[
            -len(requests) // 10 :
        ]
        latencies = [fmean(request.latency_s[number] for number in longest) for request in (own, other)]
        own_s, measured_s = fmean(own.ttft_s), fmean(request.ttft_s for request in requests)
        return Prediction(
            len(requests),
            own_s / fmean(other.ttft_s),
            latencies[0] / latencies[1],
            own_s / measured_s if measured_s else inf,
        )

    def _arrival_key(self, request: FinishedRequest) -> float:
        return request.arrival_s

    def _deadline_key(self, request: FinishedRequest) -> float:
        return request.arrival_s + self._slack_s(request.prompt - request.cached)


@dataclass(slots=True)
class QueueReplay:
    """State of a replay. By request, `pending` is how many tokens are left to compute, and `remaining` to generate."""

    model: QueueSimulator
    requests: Sequence[FinishedRequest]
    key: SortKey
    now: float = 0.0
    used_kv_tokens: int = 0
    arrived_count: int = 0
    context_s: float = 0.0
    waiting: list[tuple[float, int]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    ranks: list[tuple[float, int]] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    remaining: list[int] = field(default_factory=list)
    first_token_at_s: list[float] = field(default_factory=list)
    end_at_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        context_s = self.model.context_s
        self.context_s = CONTEXT_SHARE * self.model.profile.decode(1) if context_s is None else context_s
        self.ranks = [(self.key(request), number) for number, request in enumerate(self.requests)]
        self.pending = [max(1, request.prompt - request.cached) for request in self.requests]
        self.remaining = [max(1, request.output) for request in self.requests]
        self.first_token_at_s, self.end_at_s = [inf] * len(self.requests), [inf] * len(self.requests)

    def step(self) -> bool:
        """Simulate iterations until the next event. Return False if no request is left."""
        if not self.running and not self.waiting:
            if self.arrived_count == len(self.requests):
                return False
            self.now = max(self.now, self.requests[self.arrived_count].arrival_s)
        while (
            self.arrived_count < len(self.requests)
            and self.requests[self.arrived_count].arrival_s <= self.now
        ):
            self._arrive(self.arrived_count)
            self.arrived_count += 1
        self._admit()
        decoding = [number for number in self.running if not self.pending[number]]
        chunks = dict(self._split_prompts(self.model.token_budget - len(decoding)))
        seconds = self.model.profile.predict_iteration_s(sum(chunks.values()), len(decoding))
        seconds += self.context_s * sum(map(self._context, decoding))
        steps = 1 if chunks else self._count_uniform_steps(decoding, seconds)
        self.now += seconds * steps
        for number, tokens in chunks.items():
            self.pending[number] -= tokens
            if not self.pending[number]:
                self.first_token_at_s[number] = min(self.first_token_at_s[number], self.now)
                self._decode(number, 1)
        for number in decoding:
            self._decode(number, steps)
        while self.used_kv_tokens > self.model.kv_capacity_tokens and len(self.running) > 1:
            self._preempt(max(self.running, key=self.ranks.__getitem__))
        return True

    def _arrive(self, number: int) -> None:
        heappush(self.waiting, self.ranks[number])

    def _context(self, number: int) -> int:
        request = self.requests[number]
        return request.prompt + max(1, request.output) - self.remaining[number]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.model.batch:
            number = self.waiting[0][1]
            if self.running and self.used_kv_tokens + self._context(number) >= self.model.kv_capacity_tokens:
                return
            heappop(self.waiting)
            self.running.append(number)
            self.used_kv_tokens += self._context(number)

    def _split_prompts(self, budget: int) -> Iterator[tuple[int, int]]:
        for number in self.running:
            if self.pending[number] and budget > 0:
                yield number, min(budget, self.pending[number])
                budget -= min(budget, self.pending[number])

    def _count_uniform_steps(self, decoding: list[int], seconds: float) -> int:
        """Return the number of equal iterations until a request ends or is admitted, or until memory is full."""
        steps = min(self.remaining[number] for number in decoding)
        if self.arrived_count < len(self.requests) and len(self.running) < self.model.batch:
            steps = min(steps, ceil((self.requests[self.arrived_count].arrival_s - self.now) / seconds))
        return max(1, min(steps, (self.model.kv_capacity_tokens - self.used_kv_tokens) // len(decoding)))

    def _decode(self, number: int, tokens: int) -> None:
        self.remaining[number] -= tokens
        self.used_kv_tokens += tokens
        if not self.remaining[number]:
            self.end_at_s[number] = self.now
            self._stop(number)

    def _preempt(self, number: int) -> None:
        self._stop(number)
        self.pending[number] = self._context(number)
        heappush(self.waiting, self.ranks[number])

    def _stop(self, number: int) -> None:
        self.running.remove(number)
        self.used_kv_tokens -= self._context(number)
