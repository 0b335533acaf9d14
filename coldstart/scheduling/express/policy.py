"""What the express lane knows and what it may spend: lengths, indices, ledger, and who could pass.

Invariant: nothing here depends on an engine, and iterating yields the order of the main lane, which is that of arrival;
express.lane decides from it in the server and in the simulated engine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coldstart.scheduling.express.index import Index, Pressure, Standing, Worth, size
from coldstart.scheduling.express.ledger import Honesty, PriceLedger
from coldstart.scheduling.express.lengths import (
    EDGES,
    MOST_CLASSES,
    MOST_OCTAVES,
    Expected,
    Kind,
    Lengths,
    bin_of,
)
from coldstart.scheduling.express.waiting import Candidates
from coldstart.scheduling.job import Job
from coldstart.scheduling.policy import Policy
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Pass:
    """One request's time in the lane: until it has so many tokens, by when it should have ended with that chance."""

    kind: Kind
    until: int
    chance: float


@dataclass(slots=True)
class Totals:
    """Since the start. `foretold` sums the chances of the passes that are over, `kept` counts those that ended in the lane."""

    passes: int = 0
    extended: int = 0
    parked: int = 0
    foretold: float = 0.0
    kept: int = 0


def kind_of(job: Job) -> Kind:
    """A request's class: what the caller says of its kind, and the octave of the length that it expects."""
    if job.expected is None:
        return job.kind
    return Expected(job.kind, min(MOST_OCTAVES, max(1, job.expected).bit_length()))


class Express(Policy):
    """Arrival order, and what decides who may pass ahead of it."""

    name = "express"

    def __init__(self, profile: IterationProfile, settings: SchedulerSettings | None = None) -> None:
        s = settings or SchedulerSettings(policy=self.name)
        self.profile, self.margin = profile, s.margin
        self.lengths = Lengths(s.half_life, s.trust)
        self.index = Index(profile, self.lengths)
        self.ledger = PriceLedger(s.price)
        self.waiting = Candidates(self.index)
        self.totals = Totals()
        self.prompt = 64.0
        self._jobs: dict[str, Job] = {}
        self._numbers: dict[str, int] = {}
        self.number = self._numbers.__getitem__
        """A request's place in the order of arrival."""
        self._arrived = 0
        self._honest: OrderedDict[Kind, Honesty] = OrderedDict()

    def add(self, job: Job, now: float) -> None:
        if job.id in self._jobs:
            raise ValueError(f"job {job.id} is queued already")
        job.unserved_since = now
        self._jobs[job.id] = job
        self._arrived += 1
        self._numbers[job.id] = self._arrived
        self.prompt += 0.02 * (job.prompt_tokens - self.prompt)
        self.outside(job, job.pending)

    def remove(self, job: Job) -> None:
        """The request has ended by itself, after `job.generated` tokens."""
        self.gone(job, cut=False)

    def gone(self, job: Job, *, cut: bool) -> None:
        """The request has left; `cut`: it was aborted, so its length is not known."""
        del self._jobs[job.id], self._numbers[job.id]
        self.waiting.discard(job.id)
        kind = kind_of(job)
        self.lengths.left(kind, max(1, job.generated), cut=cut)
        own = None if cut or kind is None else self._honest.get(kind)
        if own is not None:
            own.relent()
            self.index.trust(kind, own.share)

    def outside(self, job: Job, pending: int) -> None:
        """The request does not run; `pending` tokens are computed before its next one, 0 where it keeps its KV."""
        self.waiting.add(
            job, Standing(kind_of(job), bin_of(job.generated), size(job.prompt_tokens), size(pending))
        )

    def inside(self, name: str) -> None:
        """The request runs, or its KV is being loaded."""
        self.waiting.discard(name)

    @property
    def threshold(self) -> float:
        """The index that a request must exceed to pass: the margin over what the main lane earns.

        With hints that is known of the very requests that wait: once the short ones have passed it is less, so that those of
        middle length go before the long ones, as far as credit is saved up that nothing better asks for.
        """
        base, saved = self.index.base, self.ledger.saved
        earning = self.waiting.earning() if saved else None
        if earning is not None and earning < base:
            base += saved * (earning - base)
        return self.margin * base

    def asking(self, most: int = 1) -> list[tuple[Job, Standing]]:
        """Who could pass now, the best first, at most so many; nobody while the lane is closed."""
        if not (self.ledger.open and self.lengths.learned):
            return []
        return self.waiting.best(self.threshold, most)

    def learn(self, pressure: Pressure, running: Iterable[int]) -> None:
        """Before a choice: take in the present pressure and what was learned; `running`: tokens of those who run."""
        live: Counter[int] = Counter()
        if self.index.stale():
            live.update(map(bin_of, running))
            for place, _, count in self.waiting.bins():
                live[place] += count
        self.index.refresh(pressure, live)

    def again(self, job: Job) -> Worth:
        """What going on is worth to a request in the lane: its KV is here."""
        return self.index.worth(Standing(kind_of(job), bin_of(job.generated), size(job.prompt_tokens), 0))

    def reason(self, passed: Pass, standing: Standing) -> dict[str, object]:
        """Why a request passes, for whoever watches: indices per second, tokens, seconds."""
        worth = self.index.worth(standing)
        return {
            "index": round(worth.index, 6),
            "threshold": round(self.threshold, 6),
            "until": passed.until,
            "chance": round(passed.chance, 4),
            "attained_from": EDGES[standing.bin],
            "class": None if passed.kind is None else str(passed.kind),
            "own_table": self.lengths.known(passed.kind) is not None,
            "balance_s": round(self.ledger.balance, 6),
            "honesty": round(self.ledger.honesty.share, 4),
            "memory_binds": self.index.pressure.binds,
        }

    def judged(self, passed: Pass, *, ended: bool) -> None:
        """A pass is over: believe the lane, and the class, as its forecasts deserve."""
        self.ledger.honesty.judged(passed.chance, ended=ended)
        self.totals.foretold += passed.chance
        self.totals.kept += ended
        if passed.kind is None:
            return
        own = self._honest.setdefault(passed.kind, Honesty())
        self._honest.move_to_end(passed.kind)
        if len(self._honest) > MOST_CLASSES:
            self.index.forget(self._honest.popitem(last=False)[0])
        own.judged(passed.chance, ended=ended)
        self.index.trust(passed.kind, own.share)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)
