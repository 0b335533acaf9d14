"""Life cycle of groups and their workers from launch to end; each method yields the orders that follow from one fact.

A pipeline is consolidated into single workers (ParaServe, section 6). Scaling down retains one worker. Scaling up
retains as many as the load requires, among those with enough memory. The switch happens when all of them hold the full
model. Streams that cannot move end in the pipeline, which stops after its last stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coldstart.fleet import events
from coldstart.fleet.deployments import Deployment
from coldstart.fleet.events import Action, FetchRest, Move, Refuse
from coldstart.fleet.groups import (
    FleetWorker,
    Group,
    GroupPhase,
    find_group_number,
    is_full_engine,
    name_full_engine,
)
from coldstart.fleet.requests import Agenda, TrackedRequest
from coldstart.fleet.roster import Roster
from coldstart.fleet.specification import FleetSettings

IDLE, RETRY = "idle", "retry"


class GroupLives:
    """All groups by name. `idle` are in the order in which they became idle; `moves` counts streams handed over.

    `moving` maps each stream that moves to its target group, which counts the stream from the start of the move.
    """

    def __init__(
        self, settings: FleetSettings, models: dict[str, Deployment], roster: Roster, agenda: Agenda
    ) -> None:
        self.settings, self.models, self.roster, self.agenda = settings, models, roster, agenda
        self.groups: dict[str, Group] = {}
        self.idle: dict[str, None] = {}
        self.moving: dict[str, str] = {}
        self.moves = 0

    def add(self, group: Group) -> None:
        """Add a group that was launched or found."""
        self.groups[group.name] = self.models[group.model].groups[group.name] = group

    def give(self, group: Group, request: str) -> None:
        """Count a request that is sent to the group."""
        group.in_flight[request] = None
        self.idle.pop(group.name, None)

    def drop_request(self, group: Group, request: str, now: float) -> Iterator[Action]:
        """Remove a request from the group; an empty group becomes idle, or stops if it accepts no new requests."""
        group.in_flight.pop(request, None)
        self.agenda.touch(group.model)
        if group.in_flight:
            return
        group.since = now
        if group.phase is GroupPhase.LEAVING:
            yield from self._close(group, now)
        else:
            self._rest(group, now)

    def _rest(self, group: Group, now: float) -> None:
        # A worker that still has streams in its pipeline is not idle.
        if group.idle and not (group.single and len(group.workers[0].groups) > 1):
            self.idle.pop(group.name, None)
            self.idle[group.name] = None
            self.agenda.plan(now + self.models[group.model].spec.idle_s, IDLE, group.name)

    def _close(self, group: Group, now: float) -> Iterator[Action]:
        """Remove a group without requests: its workers stop, except those that continue to serve alone."""
        self.groups.pop(group.name, None)
        self.models[group.model].groups.pop(group.name, None)
        self.idle.pop(group.name, None)
        self.agenda.free()
        yield from self.roster.stop(group, now)
        for worker in group.workers:
            if not worker.groups or worker.name not in self.roster.workers:
                continue
            if self.settings.beside:
                yield events.Release(worker.name, group.name)
            for name in worker.groups:
                self._rest(self.groups[name], now)

    def keeps_more(self, group: Group, batch: int, memory: int) -> bool:
        """Let one more worker of a starting pipeline remain after consolidation; return whether there was one.

        A worker that does not hold the full model is enlarged if its device has `memory` bytes in total for it.
        """
        if len(group.workers) < 2 or group.phase is not GroupPhase.STARTING:
            return False
        full = [worker for worker in group.workers if worker.full]
        if len(full) <= group.keep and not any(
            self.roster.grow(worker, memory) for worker in group.workers if not worker.full
        ):
            return False
        group.keep += 1
        group.capacity = batch * group.keep
        return True

    def _begin_consolidation(self, group: Group, wanted: int, batch: int, now: float) -> Iterator[FetchRest]:
        """Start consolidation of a ready pipeline: full workers fetch the rest; `wanted` more remain if possible."""
        full = sum(worker.full for worker in group.workers)
        group.keep = max(1, min(full, group.keep + wanted))
        group.capacity = batch * group.keep
        for worker in group.remaining():
            yield self.roster.fetch_rest(worker, now)

    def _is_complete(self, group: Group) -> bool:
        remaining = group.remaining()
        return len(group.workers) > 1 and bool(remaining) and all(worker.whole for worker in remaining)

    def _split(self, group: Group, batch: int, now: float) -> list[Group]:
        """Split the pipeline: each remaining worker becomes its own group, and the old group accepts no new request."""
        group.phase = GroupPhase.LEAVING
        singles = []
        for worker in group.remaining():
            single = Group(
                name_full_engine(worker.name), group.model, [worker], 1, batch, GroupPhase.SERVING, since=now
            )
            worker.groups.append(single.name)
            singles.append(single)
        return singles

    def _move_streams(self, group: Group, singles: Sequence[Group]) -> Iterator[Move]:
        """Yield a move for every stream of a split pipeline, to the single worker with the fewest streams."""
        for request in group.in_flight:
            target = min(singles, key=lambda single: len(single.in_flight))
            target.in_flight[request] = None
            self.moving[request] = target.name
            yield Move(request, group.name, target.name)

    def begin_serving(self, group: Group, now: float) -> Iterator[Action]:
        if group.phase is not GroupPhase.STARTING or not group.ready:
            return
        model = self.models[group.model]
        model.failures, group.phase, group.since = 0, GroupPhase.SERVING, now
        for worker in group.workers:
            model.failed_on.pop(worker.server, None)
        self.agenda.touch(group.model)
        self._rest(group, now)
        beside = any(name_full_engine(worker.name) in self.roster.workers for worker in group.workers)
        if self.settings.consolidate and len(group.workers) > 1 and not beside:
            yield from self._begin_consolidation(group, model.wanted(now), model.spec.batch, now)

    def consolidate(self, worker: FleetWorker, now: float) -> Iterator[Action]:
        for name in list(worker.groups):
            group = self.groups[name]
            if group.phase is not GroupPhase.SERVING or not self._is_complete(group):
                continue
            self.idle.pop(group.name, None)
            singles = self._split(group, self.models[group.model].spec.batch, now)
            for single in singles:
                self.add(single)
            for move in self._move_streams(group, singles):
                self.moves += 1
                yield move
            for remaining in group.remaining():
                self._rest(self.groups[remaining.groups[-1]], now)
            if not group.in_flight:
                yield from self._close(group, now)
            self.agenda.touch(group.model)

    def end_move(self, request: str, done: bool, now: float) -> Iterator[Action]:
        target = self.moving.pop(request, None)
        known = self.agenda.open.get(request)
        if target is None or known is None:
            return
        left = known.group if done else target
        if done:
            known.group = target
        if left in self.groups:
            yield from self.drop_request(self.groups[left], request, now)

    def end_worker(self, worker: FleetWorker, reason: str, now: float, *, own: bool) -> Iterator[Action]:
        names = list(worker.groups)
        self.roster.remove_worker(worker, now)
        self.agenda.free()
        if worker.stopping:
            return
        for name in names:
            if own and self.groups[name].phase is GroupPhase.STARTING:
                until = now + self.settings.backoff_max_s
                self.models[worker.model].failed_on[worker.server] = until
            yield from self.fail(self.groups[name], f"{worker.name}: {reason}", now, counts=own)

    def fail(self, group: Group, reason: str, now: float, *, counts: bool = True) -> Iterator[Action]:
        """End the group, as the end of any rank does; its requests wait again, in their old positions.

        The failure `counts` against the model and its requests unless their server was lost.
        """
        model, starting = self.models[group.model], group.phase is GroupPhase.STARTING
        requests = list(group.in_flight)
        group.in_flight.clear()
        yield from self._close(group, now)
        for request in requests:
            yield from self._again(request, group, reason, now, counts=counts)
        if starting:
            model.failed(reason, now, self.settings, counts=counts)
            self.agenda.plan(model.retry_at, RETRY, model.spec.name)
            if counts and model.failures > self.settings.retries:
                for request in list(model.waiting):
                    self.agenda.forget(request)
                    yield Refuse(request, 503, f"model {group.model} did not start: {reason}", 1.0)
        self.agenda.touch(group.model)

    def _again(
        self, request: str, group: Group, reason: str, now: float, *, counts: bool
    ) -> Iterator[Action]:
        known = self.agenda.open[request]
        target = self.moving.pop(request, None)
        if known.group != group.name:
            # It was only moving here: its current group still has it.
            return
        if target in self.groups:
            yield from self.drop_request(self.groups[target], request, now)
        known.tries += counts
        if known.tries > self.settings.retries or self.models[known.model].retired:
            yield self._refuse_dropped(request, known, reason)
        else:
            self.agenda.requeue(request, now)

    def _refuse_dropped(self, request: str, known: TrackedRequest, reason: str) -> Refuse:
        self.agenda.forget(request)
        return Refuse(request, 503, f"model {known.model} was lost {max(1, known.tries)} times: {reason}")

    def end_request(self, request: str, now: float) -> Iterator[Action]:
        """Remove a request that has ended from its group."""
        known = self.agenda.forget(request)
        self.agenda.touch(known.model)
        moving = self.moving.pop(request, None)
        for group in (known.group, moving):
            if group in self.groups:
                yield from self.drop_request(self.groups[group], request, now)

    def rebuild(self, ranks: tuple[events.FoundRank, ...], now: float) -> Iterator[Action]:
        """Adopt the groups of found ranks; stop ranks of unknown models and of incomplete groups."""
        by_group: dict[str, list[events.FoundRank]] = {}
        for found in ranks:
            by_group.setdefault(found.launch.group, []).append(found)
        # Adopt engines beside ranks first: their pipelines must not be consolidated a second time.
        for name, parts in sorted(by_group.items(), key=lambda one: not is_full_engine(one[0])):
            model = self.models.get(parts[0].launch.model)
            group = (
                None if model is None or name in self.groups else self.roster.adopt(parts, model.spec, now)
            )
            if model is None or group is None:
                yield from (events.Stop(part.launch.worker) for part in parts if not part.stopping)
                continue
            self.add(group)
            model.number = max(model.number, find_group_number(name))
            yield from self.begin_serving(group, now)
        for group in list(self.groups.values()):
            singles = (self.groups.get(name_full_engine(worker.name)) for worker in group.workers)
            if any(single is not None and single.phase is GroupPhase.SERVING for single in singles):
                yield from self.stop(group, now)
        for model in self.models.values():
            self.agenda.touch(model.spec.name)

    def lose_server(self, server: str, now: float) -> Iterator[Action]:
        if server not in self.roster.servers:
            return
        for worker in self.roster.lose(server):
            for name in list(worker.groups):
                if name in self.groups:
                    reason = f"server {server} was lost"
                    yield from self.fail(self.groups[name], reason, now, counts=False)
        self.agenda.free()

    def drain_server(self, server: str, now: float) -> Iterator[Action]:
        if server not in self.roster.servers:
            return
        self.roster.servers[server].draining = True
        for group in list(self.groups.values()):
            if any(worker.server == server for worker in group.workers) and group.phase is GroupPhase.SERVING:
                yield from self.stop(group, now)

    def stop(self, group: Group, now: float) -> Iterator[Action]:
        """Give the group no new requests, and stop it once its last request has ended."""
        group.phase = GroupPhase.LEAVING
        self.idle.pop(group.name, None)
        if not group.in_flight:
            yield from self._close(group, now)

    def stop_idle(self, group: Group, now: float) -> Iterator[Action]:
        """Stop a group that has been idle for its `idle_s`, unless its model needs it."""
        model = self.models[group.model]
        if not group.idle or now < group.since + model.spec.idle_s:
            return
        if model.spares(group):
            yield from self.stop(group, now)
        else:
            self.agenda.plan(now + max(1.0, model.spec.idle_s), IDLE, group.name)
