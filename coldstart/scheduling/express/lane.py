"""One step of the express lane: who of the main lane is shown, who passes, who is parked.

Invariants: while nobody is in the lane and nobody may pass there is no decision, and the engine's own step runs as it is;
the main lane starts in order of arrival; nobody of it is evicted for the lane; with slots short its youngest pauses
and keeps its KV; what the lane takes is booked on the ledger. The engine's own victim is the end of the list that it is
shown: the newest of the lane, then the youngest of the main lane; parked requests have left before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import Generic

from coldstart.scheduling.express.gauge import FEWEST, Gauge
from coldstart.scheduling.express.index import Standing
from coldstart.scheduling.express.policy import Express, Pass, kind_of
from coldstart.scheduling.express.view import LaneView
from coldstart.scheduling.job import Job
from coldstart.scheduling.placement.view import R

LOOKED_AT = 8
"""Candidates of a step: more would pass only where many bursts fit at once."""


@dataclass(slots=True)
class Turn(Generic[R]):
    """`running` in the order in which the engine is to serve and, from the end, to evict; `joining` to be admitted after, in
    that order; everybody else keeps what it holds and is not shown.
    """

    running: list[R] = field(default_factory=list)
    joining: list[R] = field(default_factory=list)


class Lane(Generic[R]):
    """The engine tells of events (`arrived`, `began`, `evicted`, `left`) and of steps (`decide` before, `stepped` after)."""

    def __init__(self, view: LaneView[R], policy: Express, *, keeps_kv: bool) -> None:
        self.view, self.policy, self.keeps_kv = view, policy, keeps_kv
        self.gauge = Gauge(view, policy, keeps_kv=keeps_kv)
        self.members: dict[str, Pass] = {}
        self.parked: dict[str, R] = {}
        self.paused: dict[str, R] = {}
        self._entering: dict[str, dict[str, object]] = {}
        self._last_s: float | None = None
        self._crowded, self._prefill_s = False, 0.0

    # --- events

    def arrived(self, job: Job, now: float) -> None:
        if not len(self.policy):
            self._last_s = None  # what has passed since then was nobody's iteration
        self.policy.add(job, now)

    def began(self, request: R) -> None:
        """It runs, or its load has begun."""
        self.policy.inside(self.view.job(request))

    def evicted(self, request: R) -> None:
        """Its blocks are gone; the host holds whole blocks of them, where it keeps any."""
        job = self.view.job(request)
        self.members.pop(job.id, None)
        self.parked.pop(job.id, None)
        self.paused.pop(job.id, None)
        kept = self.keeps_kv and self.gauge.worth_loading(job.context)
        self.policy.outside(job, self.view.block_tokens if kept else job.context)

    def left(self, job: Job, *, cut: bool = False) -> None:
        """It has ended, or was aborted."""
        passed = self.members.pop(job.id, None)
        if passed is not None and not cut:
            self.policy.judged(passed, ended=True)
        self.parked.pop(job.id, None)
        self.paused.pop(job.id, None)
        self.policy.gone(job, cut=cut)

    # --- steps

    def decide(self, now: float) -> Turn[R] | None:
        """None: the engine's own step, on its own lists."""
        self._booked(now)
        first = next(self.view.outside(), None)
        if first is None and not self.parked and not self.paused:
            self.members.clear()  # everybody's turn has come
            return None
        self.gauge.learn(len(self.parked) + len(self.paused))
        passing = self.policy.may_pass()
        if not (passing or self.members or self.parked or self.paused or self.gauge.demand >= 1):
            return None
        return self._turn(first, passing=passing)

    def stepped(self, tokens: Mapping[str, int]) -> None:
        """After the engine's step, which computed so many tokens of each (of the lane's at least)."""
        for name, reason in self._entering.items():
            if name in self.policy.waiting:
                self.members.pop(name, None)  # the engine had no room for it after all
                continue
            self.policy.totals.passes += 1
            if self.policy.observer:
                self.policy.observer.note("pass", None, request=name, **reason)
        self._entering.clear()
        index = self.policy.index
        self._prefill_s = sum(index.start_s(tokens[n]) for n in self.members if tokens.get(n, 0) > 1)
        self._crowded = bool(self.parked or self.paused) or next(self.view.outside(), None) is not None

    def hidden(self) -> Iterator[R]:
        """Requests that keep their KV and are not shown."""
        yield from self.paused.values()
        yield from self.parked.values()

    # --- the parts of a step

    def _booked(self, now: float) -> None:
        seconds = 0.0 if self._last_s is None else now - self._last_s
        self._last_s = now
        if self._crowded and seconds > 0:
            self.policy.ledger.passed(seconds, self.gauge.share(self.members), self._prefill_s)

    def _turn(self, first: R | None, *, passing: bool) -> Turn[R]:
        view = self.view
        running = view.running()
        self._come_of_age(first)
        self._ends()
        shown = [r for r in running if not self._out(r) and view.job(r).id not in self.members]
        lane = [r for r in running if view.job(r).id in self.members]
        evicted = self._grown(shown, lane)
        turn = Turn[R](shown)
        if not evicted:
            free = self._main(turn, lane, passing=passing)
            lane += self._pass(turn, free, lane, passing=passing)
        turn.running += lane
        if not turn.running and not turn.joining:
            self._anybody(turn)
        return turn

    def _out(self, request: R) -> bool:
        name = self.view.job(request).id
        return name in self.parked or name in self.paused

    def _come_of_age(self, first: R | None) -> None:
        """Requests of the lane before whom nobody is left out are in the main lane; who pauses is left out."""
        out = [*self.paused.values(), *(() if first is None else (first,))]
        least = min((self._number(request) for request in out), default=None)
        for name in list(self.members):
            if least is None or self._number(self.view.request(name)) < least:
                del self.members[name]

    def _number(self, request: R) -> int:
        return self.policy.number(self.view.job(request))

    def _ends(self) -> None:
        """Quanta that are over: go on where that is worth it, else park."""
        policy = self.policy
        for request in self.view.running():
            job = self.view.job(request)
            passed = self.members.get(job.id)
            if passed is None or job.generated < passed.until:
                continue
            policy.judged(passed, ended=False)
            worth = policy.again(job)
            if worth.index > policy.threshold and worth.until > job.generated and policy.ledger.open:
                self.members[job.id] = Pass(kind_of(job), worth.until, worth.chance)
                policy.totals.extended += 1
                continue
            del self.members[job.id]
            self.parked[job.id] = request
            policy.totals.parked += 1
            policy.outside(job, 0)

    def _grown(self, shown: list[R], lane: list[R]) -> bool:
        """Room for everybody's next token: parked ones leave, then, while some pause, the lane's newest and those."""
        view = self.view
        free = view.free_blocks()
        if not (self.parked or self.paused) or free >= len(shown) + len(lane):
            return False
        short = sum(map(view.needs, (*shown, *lane))) - free
        if short <= 0:
            return False
        victims = [*reversed(self.parked.values())]
        if self.paused:
            victims += [*reversed(lane), *reversed(self.paused.values())]
        evicted = False
        for victim in victims:
            if short <= 0:
                break
            held = view.held(victim)
            if view.evict(victim):
                short -= held
                evicted = True
                if victim in lane:
                    lane.remove(victim)
        return evicted

    def _main(self, turn: Turn[R], lane: list[R], *, passing: bool) -> int:
        """Resume, admit and load in order of arrival until the first that does not fit besides the lane's demand."""
        view = self.view
        asking = [view.request(job.id) for job, _ in self._candidates()] if passing else []
        free, kept = view.free_blocks(), self.gauge.kept(self.members, asking)
        growing = (*turn.running, *lane)
        if free < 2 * len(growing) + kept + view.capacity // 8:
            free -= sum(map(view.needs, growing))
        slots = view.batch - len(growing)
        if slots <= 0:
            return free
        for request in self._by_arrival():
            job, need = view.job(request), view.needs(request)
            if job.id not in self.parked and job.id not in self.paused and not view.able(request):
                continue
            if need + kept > free:
                free += self._room(need + kept - free, job, later=True)
            if need > free or (need + kept > free and (turn.running or turn.joining)):
                break
            if not self._seat(turn, len(lane), job):
                break
            free, slots = free - need, slots - 1
            self._starts(turn, request, job)
            if slots <= 0:
                break
        return free

    def _starts(self, turn: Turn[R], request: R, job: Job) -> None:
        held = self.parked.pop(job.id, None) is not None or self.paused.pop(job.id, None) is not None
        if held:
            self.policy.inside(job)
            turn.running.append(request)
        else:
            turn.joining.append(request)

    def _by_arrival(self) -> Iterator[R]:
        """Everybody who holds no slot, in order of arrival."""
        members, number = self.members, self._number
        landed = (r for r in self.view.landed() if self.view.job(r).id not in members)
        holders = sorted((*self.hidden(), *landed), key=number)
        return merge(holders, self.view.outside(), key=number) if holders else self.view.outside()

    def _room(self, short: int, job: Job, *, later: bool) -> int:
        """Let parked ones go, the newest first, where that is enough; with `later` only those that came after the job."""
        view, own = self.view, self.policy.number(job)
        able = [r for r in self.parked.values() if r is not view.request(job.id)]
        if later:
            able = [r for r in able if self._number(r) > own]
        if sum(map(view.held, able)) < short:
            return 0
        freed = 0
        for request in sorted(able, key=self._number, reverse=True):
            if freed >= short:
                break
            held = view.held(request)
            freed += held if view.evict(request) else 0
        return freed

    def _candidates(self) -> list[tuple[Job, Standing]]:
        return list(islice(self.policy.waiting.best(self.policy.threshold), LOOKED_AT))

    def _pass(self, turn: Turn[R], free: int, lane: list[R], *, passing: bool) -> list[R]:
        """Start whom the index puts ahead, after those whose load for it has landed; who holds its KV is returned."""
        view, taken = self.view, len(lane)
        for request in view.landed():
            if view.job(request).id in self.members and self._slot(turn, taken, view.job(request)):
                turn.joining.append(request)
                taken += 1
        back: list[R] = []
        most = max(1, min(view.batch, max(FEWEST, len(turn.running) + taken)))
        joining = {view.job(request).id for request in turn.joining}
        for job, standing in self._candidates() if passing else ():
            if taken >= most:
                break
            request = view.request(job.id)
            if job.id in joining or (job.id not in self.parked and not view.able(request)):
                continue
            need = view.needs(request)
            if need > free:
                free += self._room(need - free, job, later=False)
            if need > free or not self._slot(turn, taken, job):
                continue
            free, taken = free - need, taken + 1
            self._enter(job, standing)
            if self.parked.pop(job.id, None) is not None:
                self.policy.inside(job)
                back.append(request)
            else:
                turn.joining.append(request)
        return back

    def _slot(self, turn: Turn[R], lane: int, job: Job) -> bool:
        """A slot of the batch for one more in the lane: the youngest of the main lane pauses where there is none."""
        full = len(turn.running) + len(turn.joining) + lane >= self.view.batch
        if (full and len(turn.running) < 2) or not self._seat(turn, lane, job):
            return False
        if full:
            youngest = turn.running.pop()
            self.paused[self.view.job(youngest).id] = youngest
        return True

    def _seat(self, turn: Turn[R], lane: int, job: Job) -> bool:
        """A slot of the model runner: who keeps its KV holds one, and the newest parked one leaves where none is left."""
        if job.id in self.parked or job.id in self.paused:
            return True
        taken = len(turn.running) + len(turn.joining) + lane + len(self.parked) + len(self.paused)
        for request in [*reversed(self.parked.values())]:
            if taken < self.view.slots():
                break
            taken -= self.view.evict(request)
        return taken < self.view.slots()

    def _enter(self, job: Job, standing: Standing) -> None:
        worth = self.policy.index.worth(standing)
        self.members[job.id] = passed = Pass(standing.kind, worth.until, worth.chance)
        # Put into words only for those who watch.
        self._entering[job.id] = self.policy.reason(passed, standing) if self.policy.observer else {}

    def _anybody(self, turn: Turn[R]) -> None:
        """Nobody else can run: who holds KV does."""
        for name, request in [*self.paused.items(), *self.parked.items()][: self.view.batch]:
            self.paused.pop(name, None)
            self.parked.pop(name, None)
            self.policy.inside(self.view.job(request))
            turn.running.append(request)
