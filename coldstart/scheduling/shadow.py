"""Prediction of what another order would do to the traffic of a running server (`--shadow`). Predicted, never measured.

The latest requests that the server has answered are replayed in both orders on a queue model: one engine with a batch, a token
budget and KV memory, whose iterations take the times of the profile. A prompt is computed in chunks beside decoding requests. A
request that finds no memory for its next token loses its KV and is computed again, the last of the order first, as in vLLM.
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

LEAST, MOST = 50, 500
"""Requests that a prediction needs, and the latest that it replays."""


class Answered(NamedTuple):
    """One request: its arrival and its TTFT (time to first token) in seconds, and numbers of tokens."""

    arrival_s: float
    prompt: int
    cached: int
    output: int
    ttft_s: float = 0.0


class Replayed(NamedTuple):
    """Time to first token and latency of each request, in seconds."""

    ttft_s: list[float]
    latency_s: list[float]


class Prediction(NamedTuple):
    """Gains are the replayed times in the server's order over those in the other order, so above 1 the other one is better.

    `ttft_gain` is of the mean TTFT, `longest_gain` of the mean latency of the tenth of requests with the longest outputs.
    `model_ratio` is the replayed mean TTFT in the server's order over the measured one: how far the model is from the server.
    """

    requests: int
    ttft_gain: float
    longest_gain: float
    model_ratio: float


Key = Callable[[Answered], float]
"""Order of requests: the smallest key is served first."""


@dataclass(frozen=True, slots=True)
class QueueModel:
    """Model of one engine; `context_s` is the time that one token of context of a decoding request adds to its iteration."""

    profile: IterationProfile
    batch: int
    token_budget: int
    kv_tokens: int
    context_s: float | None = None

    def replay(self, requests: Sequence[Answered], key: Key) -> Replayed:
        """Serve requests, given in order of arrival; one that never fits the KV memory is served alone."""
        run = _Run(self, requests, key)
        while run.step():
            pass
        firsts, ends = (
            [time - one.arrival_s for time, one in zip(times, requests, strict=True)]
            for times in (run.firsts, run.ends)
        )
        return Replayed(firsts, ends)


class Shadow:
    """Latest answered requests, replayed in order of arrival and in order of deadlines."""

    def __init__(self, model: QueueModel, slack_s: Callable[[int], float], *, serves_deadlines: bool) -> None:
        self._model, self._slack_s, self._serves_deadlines = model, slack_s, serves_deadlines
        self._requests = deque[Answered](maxlen=MOST)

    def add(self, one: Answered) -> None:
        """Add a request that has ended."""
        self._requests.append(one)

    def predict(self) -> Prediction | None:
        """Return what the other order would do to the latest requests; None with fewer than LEAST."""
        requests = sorted(self._requests)
        if len(requests) < LEAST:
            return None
        own, other = (
            self._model.replay(requests, self._deadline if deadlines else self._arrival)
            for deadlines in (self._serves_deadlines, not self._serves_deadlines)
        )
        longest = sorted(range(len(requests)), key=lambda number: requests[number].output)[
            -len(requests) // 10 :
        ]
        latencies = [fmean(one.latency_s[number] for number in longest) for one in (own, other)]
        own_s, measured_s = fmean(own.ttft_s), fmean(one.ttft_s for one in requests)
        return Prediction(
            len(requests),
            own_s / fmean(other.ttft_s),
            latencies[0] / latencies[1],
            own_s / measured_s if measured_s else inf,
        )

    def _arrival(self, one: Answered) -> float:
        return one.arrival_s

    def _deadline(self, one: Answered) -> float:
        return one.arrival_s + self._slack_s(one.prompt - one.cached)


@dataclass(slots=True)
class _Run:
    """State of one replay. Lists are by request: `pending` tokens to compute, `left` tokens to generate."""

    model: QueueModel
    requests: Sequence[Answered]
    key: Key
    now: float = 0.0
    used: int = 0
    arrived: int = 0
    context_s: float = 0.0
    waiting: list[tuple[float, int]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    ranks: list[tuple[float, int]] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = self.model.context_s
        self.context_s = CONTEXT_SHARE * self.model.profile.decode(1) if given is None else given
        self.ranks = [(self.key(one), number) for number, one in enumerate(self.requests)]
        self.pending = [max(1, one.prompt - one.cached) for one in self.requests]
        self.left = [max(1, one.output) for one in self.requests]
        self.firsts, self.ends = [inf] * len(self.requests), [inf] * len(self.requests)

    def step(self) -> bool:
        """Run iterations until the next event; return whether requests are left."""
        if not self.running and not self.waiting:
            if self.arrived == len(self.requests):
                return False
            self.now = max(self.now, self.requests[self.arrived].arrival_s)
        while self.arrived < len(self.requests) and self.requests[self.arrived].arrival_s <= self.now:
            heappush(self.waiting, self.ranks[self.arrived])
            self.arrived += 1
        self._admit()
        decoding = [number for number in self.running if not self.pending[number]]
        chunks = dict(self._chunks(self.model.token_budget - len(decoding)))
        seconds = self.model.profile.iteration_s(sum(chunks.values()), len(decoding))
        seconds += self.context_s * sum(map(self._context, decoding))
        steps = 1 if chunks else self._quiet_steps(decoding, seconds)
        self.now += seconds * steps
        for number, tokens in chunks.items():
            self.pending[number] -= tokens
            if not self.pending[number]:
                self.firsts[number] = min(self.firsts[number], self.now)
                self._decode(number, 1)
        for number in decoding:
            self._decode(number, steps)
        while self.used > self.model.kv_tokens and len(self.running) > 1:
            self._preempt(max(self.running, key=self.ranks.__getitem__))
        return True

    def _context(self, number: int) -> int:
        one = self.requests[number]
        return one.prompt + max(1, one.output) - self.left[number]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.model.batch:
            number = self.waiting[0][1]
            if self.running and self.used + self._context(number) >= self.model.kv_tokens:
                return
            heappop(self.waiting)
            self.running.append(number)
            self.used += self._context(number)

    def _chunks(self, budget: int) -> Iterator[tuple[int, int]]:
        for number in self.running:
            if self.pending[number] and budget > 0:
                yield number, min(budget, self.pending[number])
                budget -= min(budget, self.pending[number])

    def _quiet_steps(self, decoding: list[int], seconds: float) -> int:
        """Return the number of equal iterations until a request ends, arrives where there is a slot, or memory is full."""
        steps = min(self.left[number] for number in decoding)
        if self.arrived < len(self.requests) and len(self.running) < self.model.batch:
            steps = min(steps, ceil((self.requests[self.arrived].arrival_s - self.now) / seconds))
        return max(1, min(steps, (self.model.kv_tokens - self.used) // len(decoding)))

    def _decode(self, number: int, tokens: int) -> None:
        self.left[number] -= tokens
        self.used += tokens
        if not self.left[number]:
            self.ends[number] = self.now
            self._stop(number)

    def _preempt(self, number: int) -> None:
        self._stop(number)
        self.pending[number] = self._context(number)
        heappush(self.waiting, self.ranks[number])

    def _stop(self, number: int) -> None:
        self.running.remove(number)
        self.used -= self._context(number)
