"""One step of the express lane: who of the main lane is shown, who passes, who is parked.

Invariants: while nobody is in the lane and nobody may pass there is no decision, and the engine's own step runs as it is;
it is decided where something has changed (`rhythm`), and else the engine goes on with those who run;
the main lane starts in order of arrival; nobody of it is evicted for the lane; with slots short its youngest pauses
and keeps its KV; what the lane takes is booked on the ledger. The engine's own victim is the end of the list that it is
shown: the newest of the lane, then the youngest of the main lane; parked requests have left before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Generic

from coldstart.scheduling.express.admission import LOOKED_AT, Candidacy, LaneAdmission, Turn
from coldstart.scheduling.express.gauge import Gauge
from coldstart.scheduling.express.policy import Express, Pass, kind_of
from coldstart.scheduling.express.rhythm import Rhythm
from coldstart.scheduling.express.room import LaneRoom
from coldstart.scheduling.express.view import LaneView
from coldstart.scheduling.job import Job
from coldstart.scheduling.placement.view import R

_ENDLESS = 1 << 30


class Lane(Generic[R]):
    """The engine tells of events (`arrived`, `began`, `evicted`, `left`, and `rhythm.stir` where a load has landed) and of
    steps (`decide` before, `stepped` after).
    """

    def __init__(self, view: LaneView[R], policy: Express, *, keeps_kv: bool) -> None:
        self.view, self.policy, self.keeps_kv = view, policy, keeps_kv
        self.gauge, self.rhythm = Gauge(view, policy, keeps_kv=keeps_kv), Rhythm()
        self.room = LaneRoom(view, policy, self.rhythm)
        self.members, self.parked, self.paused = self.room.members, self.room.parked, self.room.paused
        self._admission = LaneAdmission(view, policy, self.room, self.gauge)
        self._ledger = policy.ledger
        self._last_s: float | None = None
        self._crowded, self._share, self._prefill_s = False, 0.0, 0.0
        self._turned: Turn[R] | None = None
        self._shown, self._free, self._moved = 0, 0, False
        self._missing = 0

    # --- events

    def arrived(self, job: Job, now: float) -> None:
        if not len(self.policy):
            self._last_s = None  # what has passed since then was nobody's iteration
        self.policy.add(job, now)
        self.rhythm.stir()

    def began(self, request: R) -> None:
        """It runs, or its load has begun."""
        self.policy.inside(self.view.name(request))
        self._moved = True

    def evicted(self, request: R) -> None:
        """Its blocks are gone; the host holds copies of them, where it keeps any."""
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
        if self._crowded and self._last_s is not None and now > self._last_s:
            self._ledger.passed(now - self._last_s, self._share, self._prefill_s)
        is_open = self._ledger.open
        self._last_s = now
        if not self.rhythm.due(is_open) and (self._turned is None or self._roomy()):
            return None if self._turned is None else Turn(list(self.view.running()))
        steps = self.rhythm.steps
        self.rhythm.deciding(is_open)
        self._missing -= steps
        self._turned, self._moved = self._decided(steps), True
        self.rhythm.rest(self._rest())
        return self._turned

    def stepped(self, tokens: Mapping[str, int]) -> None:
        """After the engine's step, which computed so many tokens of each (of the lane's at least)."""
        if self._admission.entering:
            self._entered(self._admission.entering)
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

    def _entered(self, entering: dict[str, dict[str, object]]) -> None:
        for name, reason in entering.items():
            if name in self.policy.waiting:
                self.members.pop(name, None)  # the engine had no room for it after all
                continue
            self.policy.totals.passes += 1
            if self.policy.observer:
                self.policy.observer.note("pass", None, request=name, **reason)
        entering.clear()

    def _turned_out(self, turn: Turn[R]) -> None:
        """Who joined may not have been admitted, or only in part: decide again; a prefill lasts for one step."""
        late = any(self.view.name(request) in self.policy.waiting for request in turn.joining)
        if late or self._prefill_s:
            self.rhythm.stir()
        self._shown = len(self.view.running())

    def hidden(self) -> Iterator[R]:
        """Requests that keep their KV and are not shown."""
        yield from self.paused.values()
        yield from self.parked.values()

    # --- the parts of a step

    def _roomy(self) -> bool:
        """Whether nothing came free that somebody waits for, and who is shown has room for a token more.

        Where the lane decided nothing the engine itself sees who waits, and nobody is hidden.
        """
        if not self._crowded:
            return True
        free, before = self.view.free_blocks(), self._free
        self._free = free
        return free <= before and (free >= self._shown or not (self.parked or self.paused))

    def _rest(self) -> int:
        """Tokens until the first quantum ends. Looked up of everybody once it may have ended, else of those who enter."""
        names = self._admission.entering if self._missing > 0 else self.members
        missing = [
            self.members[name].until - self.view.job(self.view.request(name)).generated for name in names
        ]
        if self._missing > 0:
            missing.append(self._missing)
        self._missing = min(missing, default=_ENDLESS)
        return min((tokens for tokens in missing if tokens > 0), default=_ENDLESS)

    def _decided(self, steps: int) -> Turn[R] | None:
        first = next(self.view.outside(), None)
        if first is None and not self.parked and not self.paused:
            self.members.clear()  # everybody's turn has come
            return None
        if self._everybody_fits():
            return None
        self.gauge.learn(len(self.parked) + len(self.paused), steps)
        asking = self._ahead_of_others(self.policy.asking(LOOKED_AT))
        if not (asking or self.members or self.parked or self.paused):
            return None
        return self._turn(first, asking)

    def _ahead_of_others(self, asking: Candidacy) -> Candidacy:
        """Those who would pass somebody. With slots free that is not who is first in line, or behind none but such: what it
        waits for is room, and room that is kept for the lane would keep out just it.
        """
        view = self.view
        if not asking or len(view.running()) >= view.batch:
            return asking
        names = {job.id for job, _ in asking}
        first = set(takewhile(names.__contains__, map(view.name, view.outside())))
        return [(job, standing) for job, standing in asking if job.id not in first]

    def _everybody_fits(self) -> bool:
        """Whether the engine's own step starts all who wait."""
        view, running = self.view, len(self.view.running())
        if self.parked or self.paused or running + len(self.policy.waiting) > view.batch:
            return False
        return running + sum(map(view.needs, view.outside())) <= view.free_blocks()

    def _turn(self, first: R | None, asking: Candidacy) -> Turn[R]:
        self._come_of_age(first)
        running = self._ends()
        mine = {self.view.request(name) for name in self.members}
        shown = [r for r in running if r not in mine] if mine else running
        lane = [r for r in running if r in mine] if mine else []
        evicted = self.room.grow(shown, lane)
        turn: Turn[R] = Turn(shown)
        if evicted:
            self.rhythm.stir()
        else:
            lane += self._admission.admit(turn, lane, asking)
        turn.running += lane
        if not turn.running:
            self._admission.anybody(turn)
        return turn

    def _come_of_age(self, first: R | None) -> None:
        """Requests of the lane before whom nobody is left out are in the main lane; who pauses is left out."""
        number = self.policy.number
        out = (*self.paused, self.view.name(first)) if first is not None else tuple(self.paused)
        least = min(map(number, out), default=None)
        for name in [name for name in self.members if least is None or number(name) < least]:
            del self.members[name]

    def _ends(self) -> list[R]:
        """Quanta that are over: go on where that is worth it, else park; those who run then."""
        policy, running = self.policy, list(self.view.running())
        if self._missing > 0:
            return running
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
