"""One step of the express lane: who of the main lane is shown, who passes, who is parked.

Invariants: while nobody is in the lane and nobody may pass there is no decision, and the engine's own step runs as it is;
it is decided where something has changed (`rhythm`), and else the engine goes on with those who run;
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
from coldstart.scheduling.express.rhythm import Rhythm
from coldstart.scheduling.express.room import LaneRoom
from coldstart.scheduling.express.view import LaneView
from coldstart.scheduling.job import Job
from coldstart.scheduling.placement.view import R

LOOKED_AT = 8
"""Candidates of a step: more would pass only where many bursts fit at once."""


Candidacy = list[tuple[Job, Standing]]
"""Who could pass, the best first."""


@dataclass(slots=True)
class Turn(Generic[R]):
    """`running` in the order in which the engine is to serve and, from the end, to evict; `joining` to be admitted after, in
    that order; everybody else keeps what it holds and is not shown.
    """

    running: list[R] = field(default_factory=list)
    joining: list[R] = field(default_factory=list)


class Lane(Generic[R]):
    """The engine tells of events (`arrived`, `began`, `evicted`, `left`, and `rhythm.stir` where a load has landed) and of
    steps (`decide` before, `stepped` after).
    """

    def __init__(self, view: LaneView[R], policy: Express, *, keeps_kv: bool) -> None:
        self.view, self.policy, self.keeps_kv = view, policy, keeps_kv
        self.gauge, self.rhythm = Gauge(view, policy, keeps_kv=keeps_kv), Rhythm()
        self.room = LaneRoom(view, policy, self.rhythm)
        self.members, self.parked, self.paused = self.room.members, self.room.parked, self.room.paused
        self._entering: dict[str, dict[str, object]] = {}
        self._last_s: float | None = None
        self._crowded, self._share, self._prefill_s = False, 0.0, 0.0
        self._turned: Turn[R] | None = None
        self._shown, self._free, self._moved = 0, 0, False

    # --- events

    def arrived(self, job: Job, now: float) -> None:
        if not len(self.policy):
            self._last_s = None  # what has passed since then was nobody's iteration
        self.policy.add(job, now)
        self.rhythm.stir()

    def began(self, request: R) -> None:
        """It runs, or its load has begun."""
        self.policy.inside(self.view.job(request))
        self._moved = True

    def evicted(self, request: R) -> None:
        """Its blocks are gone; the host holds whole blocks of them, where it keeps any."""
        job = self.view.job(request)
        self.members.pop(job.id, None)
        self.parked.pop(job.id, None)
        self.paused.pop(job.id, None)
        kept = self.keeps_kv and self.gauge.worth_loading(job.context)
        self.policy.outside(job, self.view.block_tokens if kept else job.context)
        self.rhythm.stir()

    def left(self, job: Job, *, cut: bool = False) -> None:
        """It has ended, or was aborted."""
        passed = self.members.pop(job.id, None)
        if passed is not None and not cut:
            self.policy.judged(passed, ended=True)
        self.parked.pop(job.id, None)
        self.paused.pop(job.id, None)
        self.policy.gone(job, cut=cut)
        self.rhythm.stir()

    # --- steps

    def decide(self, now: float) -> Turn[R] | None:
        """None: the engine's own step, on its own lists."""
        if self._crowded:
            self._booked(now)
        self._last_s = now
        is_open = self.policy.ledger.open
        if not self.rhythm.due(is_open=is_open) and self._roomy():
            return None if self._turned is None else Turn(list(self.view.running()))
        steps = self.rhythm.steps
        self.rhythm.deciding(is_open=is_open)
        self._turned, self._moved = self._decided(steps), True
        self.rhythm.rest(self._missing())
        return self._turned

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
        if not self._moved:
            return
        self._moved = False
        index = self.policy.index
        self._prefill_s = sum(index.start_s(tokens[n]) for n in self.members if tokens.get(n, 0) > 1)
        self._share = self.gauge.share(self.members)
        self._crowded = bool(self.parked or self.paused) or next(self.view.outside(), None) is not None
        self._free = self.view.free_blocks()
        if self._turned is not None:
            self._turned_out(self._turned)

    def _turned_out(self, turn: Turn[R]) -> None:
        """Who joined may not have been admitted, or only in part: decide again; a prefill lasts for one step."""
        late = any(self.view.job(request).id in self.policy.waiting for request in turn.joining)
        if late or self._prefill_s:
            self.rhythm.stir()
        self._shown = len(self.view.running())

    def hidden(self) -> Iterator[R]:
        """Requests that keep their KV and are not shown."""
        yield from self.paused.values()
        yield from self.parked.values()

    # --- the parts of a step

    def _booked(self, now: float) -> None:
        seconds = 0.0 if self._last_s is None else now - self._last_s
        if seconds > 0:
            self.policy.ledger.passed(seconds, self._share, self._prefill_s)

    def _roomy(self) -> bool:
        """Whether nothing came free that somebody waits for, and who is shown has room for a token more."""
        if not self._crowded:
            return True
        free, before = self.view.free_blocks(), self._free
        self._free = free
        return free <= before and (free >= self._shown or not (self.parked or self.paused))

    def _missing(self) -> int:
        """Tokens until the first quantum ends."""
        missing = (
            passed.until - self.view.job(self.view.request(name)).generated
            for name, passed in self.members.items()
        )
        return min((tokens for tokens in missing if tokens > 0), default=1 << 30)

    def _decided(self, steps: int) -> Turn[R] | None:
        first = next(self.view.outside(), None)
        if first is None and not self.parked and not self.paused:
            self.members.clear()  # everybody's turn has come
            return None
        self.gauge.learn(len(self.parked) + len(self.paused), steps)
        passing = self.policy.may_pass()
        if not (passing or self.members or self.parked or self.paused or self.gauge.demand >= 1):
            return None
        return self._turn(first, steps, passing=passing)

    def _turn(self, first: R | None, steps: int, *, passing: bool) -> Turn[R]:
        self._come_of_age(first)
        running = self._ends()
        mine = {self.view.request(name) for name in self.members}
        shown = [r for r in running if r not in mine] if mine else running
        lane = [r for r in running if r in mine] if mine else []
        evicted = self.room.grow(shown, lane)
        turn = Turn[R](shown)
        if not evicted:
            asking = self._candidates() if passing else []
            free = self._main(turn, lane, asking, steps)
            lane += self._pass(turn, free, lane, asking)
        else:
            self.rhythm.stir()
        turn.running += lane
        if not turn.running:
            self._anybody(turn)
        return turn

    def _come_of_age(self, first: R | None) -> None:
        """Requests of the lane before whom nobody is left out are in the main lane; who pauses is left out."""
        out = [*self.paused.values(), *(() if first is None else (first,))]
        least = min((self._number(request) for request in out), default=None)
        for name in list(self.members):
            if least is None or self._number(self.view.request(name)) < least:
                del self.members[name]

    def _number(self, request: R) -> int:
        return self.policy.number(self.view.job(request))

    def _ends(self) -> list[R]:
        """Quanta that are over: go on where that is worth it, else park; those who run then."""
        policy, running = self.policy, list(self.view.running())
        for name, passed in list(self.members.items()):
            request = self.view.request(name)
            job = self.view.job(request)
            if job.generated < passed.until or name in policy.waiting or request not in running:
                continue
            policy.judged(passed, ended=False)
            worth = policy.again(job)
            if worth.index > policy.threshold and worth.until > job.generated and policy.ledger.open:
                self.members[name] = Pass(kind_of(job), worth.until, worth.chance)
                policy.totals.extended += 1
                continue
            del self.members[name]
            running.remove(request)
            self.parked[name] = request
            policy.totals.parked += 1
            policy.outside(job, 0)
        return running

    def _main(self, turn: Turn[R], lane: list[R], asking: Candidacy, steps: int) -> int:
        """Resume, admit and load in order of arrival until the first that does not fit besides the lane's demand."""
        view = self.view
        kept = self.gauge.kept(self.members, [view.request(job.id) for job, _ in asking], steps)
        free = view.free_blocks()
        growing = (*turn.running, *lane)
        if free < 2 * len(growing) + kept + view.capacity // 8:
            free -= sum(map(view.needs, growing))
        slots = view.batch - len(growing)
        if slots <= 0:
            return free
        for request in self._by_arrival():
            job, need = view.job(request), view.needs(request)
            if job.id not in self.parked and job.id not in self.paused and not view.able(request):
                self.rhythm.stir()  # nobody tells when it is
                continue
            if need + kept > free:
                free += self.room.vacate(need + kept - free, job, later=True)
            if need > free or (need + kept > free and (turn.running or turn.joining)):
                break
            if not self.room.seat(len(turn.running) + len(turn.joining) + len(lane), job):
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
        """Everybody who holds no slot, in order of arrival; whose KV is back on the device first, as in the engine: what
        it holds could be what another waits for.
        """
        members, number = self.members, self._number
        yield from (r for r in self.view.landed() if self.view.job(r).id not in members)
        hidden = sorted(self.hidden(), key=number)
        yield from merge(hidden, self.view.outside(), key=number) if hidden else self.view.outside()

    def _candidates(self) -> Candidacy:
        return list(islice(self.policy.waiting.best(self.policy.threshold), LOOKED_AT))

    def _pass(self, turn: Turn[R], free: int, lane: list[R], asking: Candidacy) -> list[R]:
        """Start whom the index puts ahead, after those whose load for it has landed; who holds its KV is returned."""
        view, taken = self.view, len(lane)
        for request in view.landed():
            if view.job(request).id in self.members and self._slot(turn, taken, view.job(request)):
                turn.joining.append(request)
                taken += 1
        back: list[R] = []
        most = max(1, min(view.batch, max(FEWEST, len(turn.running) + taken)))
        joining = {view.job(request).id for request in turn.joining}
        for job, standing in asking:
            if taken >= most:
                break
            request = view.request(job.id)
            if job.id in joining or job.id not in self.policy.waiting:
                continue
            if job.id not in self.parked and not view.able(request):
                self.rhythm.stir()
                continue
            need = view.needs(request)
            if need > free:
                free += self.room.vacate(need - free, job, later=False)
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
        taken = len(turn.running) + len(turn.joining) + lane
        full = taken >= self.view.batch
        if (full and len(turn.running) < 2) or not self.room.seat(taken, job):
            return False
        if full:
            youngest = turn.running.pop()
            self.paused[self.view.job(youngest).id] = youngest
        return True

    def _enter(self, job: Job, standing: Standing) -> None:
        worth = self.policy.index.worth(standing)
        self.members[job.id] = passed = Pass(standing.kind, worth.until, worth.chance)
        # Put into words only for those who watch.
        self._entering[job.id] = self.policy.reason(passed, standing) if self.policy.observer else {}

    def _anybody(self, turn: Turn[R]) -> None:
        """Nobody runs: who holds KV does, beside those who join, who may have to load first or may not fit after all.

        Without either, the first in line joins: the engine itself says whether it fits.
        """
        hidden = [*self.paused.items(), *self.parked.items()]
        if hidden and len(turn.joining) >= self.view.batch:
            turn.joining.pop()
        for name, request in hidden[: self.view.batch - len(turn.joining)]:
            self.paused.pop(name, None)
            self.parked.pop(name, None)
            self.policy.inside(self.view.job(request))
            turn.running.append(request)
        if not turn.running and not turn.joining:
            turn.joining += islice(filter(self.view.able, self._by_arrival()), 1)
