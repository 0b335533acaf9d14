"""Iteration times of one server, measured from outside with requests that are not part of a trace.

Equations: the time to the first token of an n-token prompt is request_s + prefill(n); one token of prompt takes what
one token of decoding takes, prefill(1) = decode(1), which gives request_s. A request that starts last of b equal ones
decodes with all of them from its first token to its last: decode(b) + context_s * b * (its prompt + half its answer).
CROWD * b equal requests at once take what the simulator says plus crowd_s for each iteration that leaves one of them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from benchmarks.scheduling.live.measure import send
from benchmarks.scheduling.live.servers import Server
from coldstart.lab.replay import RequestRecord
from coldstart.lab.scheduling import SimSettings, simulate
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import IterationProfile, SchedulerSettings

PROMPTS = (1, 16, 32, 64, 128, 256, 512)
ALONE_S = 0.4
"""Between two single prompts: longer than the longest takes."""

REPEATS = 3
SHORT, LONG, ANSWER = 16, 512, 96
CROWD = 6
"""Batches of requests at once."""

PACE = 3


@dataclass(frozen=True, slots=True)
class Probes:
    """Seconds; medians of REPEATS measurements."""

    first_token_s: dict[int, float]
    per_token_s: dict[int, float]
    per_token_long_s: float
    crowded_s: float
    pace_s: float
    batch: int

    @property
    def context_s(self) -> float:
        """Per token of context that a decoding job reads."""
        added = self.per_token_long_s - self.per_token_s[self.batch]
        return max(0.0, added / (self.batch * (LONG - SHORT)))

    @property
    def request_s(self) -> float:
        """Outside the engine, for each request."""
        return max(0.0, self.first_token_s[1] - self._decode(1))

    def profile(self) -> IterationProfile:
        """Iteration times as a bundle has them."""
        prefill = [(n, max(seconds - self.request_s, 1e-6)) for n, seconds in self.first_token_s.items()]
        return IterationProfile.create(prefill, [(b, self._decode(b)) for b in self.per_token_s])

    def settings(self, scheduler: SchedulerSettings) -> SimSettings:
        """The simulated engine with what was measured; `scheduler` is the server's."""
        known = SimSettings(request_s=self.request_s, context_s=self.context_s)
        outcome = simulate(crowd(self.batch), self.profile(), scheduler, known)
        more_s = max(0.0, self.crowded_s - outcome.finished_s)
        return replace(known, crowd_s=more_s / max(1, outcome.crowded))

    def paced(self, factor: float) -> Probes:
        """The same server on a machine that takes `factor` times as long."""
        return replace(
            self,
            first_token_s={size: factor * seconds for size, seconds in self.first_token_s.items()},
            per_token_s={size: factor * seconds for size, seconds in self.per_token_s.items()},
            per_token_long_s=factor * self.per_token_long_s,
            crowded_s=factor * self.crowded_s,
        )

    def document(self) -> dict[str, object]:
        found = {
            "request_s": self.request_s,
            "context_s": self.context_s,
            "profile": self.profile().encode(),
        }
        return asdict(self) | found

    def _decode(self, batch: int) -> float:
        return self.per_token_s[batch] - self.context_s * batch * (SHORT + ANSWER / 2)


def probe(server: Server, batch: int, seeds: Iterator[int]) -> Probes:
    """Measure a server of that batch. `seeds` gives every sending its own prompts, so that none is cached."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < batch] + [batch]
    _together(server, batch, SHORT, next(seeds))  # the first requests of a server's life are slower
    first = _first_tokens(server, next(seeds))
    short: dict[int, list[float]] = {size: [] for size in sizes}
    long, crowded, paces = [], [], []
    for _ in range(REPEATS):
        for size in sizes:
            short[size].append(_together(server, size, SHORT, next(seeds)))
        long.append(_together(server, batch, LONG, next(seeds)))
        crowded.append(_ended(server, crowd(batch), next(seeds)))
        paces.append(pace(server, batch, seeds))
    decode = {size: median(found) for size, found in short.items()}
    return Probes(first, decode, median(long), median(crowded), median(paces), batch)


def pace(server: Server, batch: int, seeds: Iterator[int]) -> float:
    """Seconds of a fixed little work, to see how fast the machine is at this moment."""
    return _ended(server, paces(batch), next(seeds))


def paces(batch: int) -> list[TraceRequest]:
    """The fixed little work."""
    return [TraceRequest(0.0, SHORT, ANSWER)] * (PACE * batch)


def _ended(server: Server, rows: Sequence[TraceRequest], seed: int) -> float:
    return max(record.finished_s or 0.0 for record in send(server, rows, seed))


def crowd(batch: int) -> list[TraceRequest]:
    """Equal requests, far more than a batch."""
    return [TraceRequest(0.0, SHORT, ANSWER)] * (CROWD * batch)


def _first_tokens(server: Server, seed: int) -> dict[int, float]:
    sizes = PROMPTS * REPEATS
    rows = [TraceRequest(number * ALONE_S, size, 1) for number, size in enumerate(sizes)]
    records = send(server, rows, seed)
    return {size: median(_waited(records, size)) for size in PROMPTS}


def _waited(records: Sequence[RequestRecord], size: int) -> list[float]:
    mine = [record for record in records if record.prompt_tokens == size]
    return [
        record.first_token_s - record.sent_s
        for record in mine
        if record.first_token_s is not None and record.sent_s is not None
    ]


def _together(server: Server, count: int, prompt: int, seed: int) -> float:
    """Seconds per token of the last of `count` equal requests to start."""
    records = send(server, [TraceRequest(0.0, prompt, ANSWER)] * count, seed)
    last = max(records, key=lambda record: record.first_token_s or 0.0)
    if last.tpot_s is None:
        raise SystemExit("a probe's answer had one token")
    return last.tpot_s
