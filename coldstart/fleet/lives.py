"""The lives of groups and their workers, and what becomes of requests when one ends: the inner half of the fleet's core.

Nothing here is asked from outside; `core` tells it what happened. Its methods give the orders that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coldstart.fleet import events
from coldstart.fleet.consolidation import Consolidation
from coldstart.fleet.deployments import Deployment
from coldstart.fleet.events import Action, Refuse
from coldstart.fleet.groups import WHOLE, FleetWorker, Group, GroupPhase
from coldstart.fleet.roster import Roster
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec
from coldstart.fleet.timers import Timers
from coldstart.fleet.window import Window

HOLD, IDLE, RETRY = "hold", "idle", "retry"


class GroupLives:
    """`now` is in seconds on one clock that never goes back. `starts` counts groups, `moves` streams handed over."""

    def __init__(
        self,
        settings: FleetSettings,
        servers: Iterable[ServerSpec] = (),
        models: Iterable[FleetModel] = (),
    ) -> None:
        self.settings, self.roster, self.timers = settings, Roster(settings), Timers()
        self.models: dict[str, Deployment] = {}
        self.groups: dict[str, Group] = {}
        self.starts = self.moves = self.held = 0
        self._requests: dict[str, tuple[str, float, str | None]] = {}
        self._tries: dict[str, int] = {}
        self._blocked: dict[str, None] = {}
        self._idle: dict[str, None] = {}
        self._reclaimed: dict[str, str] = {}
        self._touched: dict[str, None] = {}
        self._freed = False
        self._consolidation = Consolidation(self.roster)
        for server in servers:
            self.roster.cluster.join(server, 0.0)
        for model in models:
            self._deployed(model)

    # Requests that wait.

    def _wait(
        self, request: str, model: Deployment, since: float, now: float, *, again: bool = False
    ) -> None:
        self._requests[request] = model.spec.name, since, None
        self.held += 1
        self.timers.add(now + self.settings.hold_s, HOLD, request)
        if again:
            model.back(request, since)
        else:
            model.waiting[request] = since
        self._touched[model.spec.name] = None

    def _forget(self, request: str) -> None:
        name, _, group = self._requests.pop(request)
        self._tries.pop(request, None)
        if group is None:
            self.held -= 1
            self.models[name].waiting.pop(request, None)

    # A group's requests, and its end.

    def _left(self, group: Group, request: str, now: float) -> Iterator[Action]:
        """The group no longer has that request."""
        group.in_flight.pop(request, None)
        self._touched[group.model] = None
        if group.in_flight:
            return
        group.since = now
        if group.phase is GroupPhase.LEAVING:
            yield from self._close(group, now)
        else:
            self._rest(group, now)

    def _rest(self, group: Group, now: float) -> None:
        # A worker that has streams in its pipeline still does not idle.
        if group.idle and not (group.single and len(group.workers[0].groups) > 1):
            self._idle.pop(group.name, None)
            self._idle[group.name] = None
            self.timers.add(now + self.models[group.model].spec.idle_s, IDLE, group.name)

    def _close(self, group: Group, now: float) -> Iterator[Action]:
        """Nobody uses it: its workers stop, but those that serve on by themselves."""
        self.groups.pop(group.name, None)
        self.models[group.model].groups.pop(group.name, None)
        self._idle.pop(group.name, None)
        self._freed = True
        yield from self.roster.stop(group, now)
        for worker in group.workers:
            if not worker.groups or worker.name not in self.roster.workers:
                continue
            if self.settings.beside:
                yield events.Release(worker.name, group.name)
            for name in worker.groups:
                self._rest(self.groups[name], now)

    # A group's life.

    def _up(self, group: Group, now: float) -> Iterator[Action]:
        if group.phase is not GroupPhase.STARTING or not group.ready:
            return
        model = self.models[group.model]
        model.failures, group.phase, group.since = 0, GroupPhase.SERVING, now
        for worker in group.workers:
            model.failed_on.pop(worker.server, None)
        self._touched[group.model] = None
        self._rest(group, now)
        beside = any(worker.name + WHOLE in self.roster.workers for worker in group.workers)
        if self.settings.consolidate and len(group.workers) > 1 and not beside:
            yield from self._consolidation.begin(group, model.wanted(now), model.spec.batch, now)

    def _whole(self, worker: FleetWorker, now: float) -> Iterator[Action]:
        for name in list(worker.groups):
            group = self.groups[name]
            if group.phase is not GroupPhase.SERVING or not self._consolidation.complete(group):
                continue
            self._idle.pop(group.name, None)
            for single in self._consolidation.split(group, self.models[group.model].spec.batch, now):
                self.groups[single.name] = self.models[group.model].groups[single.name] = single
            for move in self._consolidation.moves(group, self.groups):
                self.moves += 1
                yield move
            for remaining in group.remaining():
                self._rest(self.groups[remaining.groups[-1]], now)
            if not group.in_flight:
                yield from self._close(group, now)
            self._touched[group.model] = None

    def _moved(self, request: str, done: bool, now: float) -> Iterator[Action]:
        target = self._consolidation.moving.pop(request, None)
        if target is None or request not in self._requests:
            return
        name, since, source = self._requests[request]
        left = source if done else target
        if done:
            self._requests[request] = name, since, target
        if left in self.groups:
            yield from self._left(self.groups[left], request, now)

    def _died(self, worker: FleetWorker, reason: str, now: float, *, own: bool) -> Iterator[Action]:
        names = list(worker.groups)
        self.roster.gone(worker, now)
        self._freed = True
        if worker.stopping:
            return
        for name in names:
            if own and self.groups[name].phase is GroupPhase.STARTING:
                until = now + self.settings.backoff_max_s
                self.models[worker.model].failed_on[worker.server] = until
            yield from self._failed(self.groups[name], f"{worker.name}: {reason}", now, counts=own)

    def _failed(self, group: Group, reason: str, now: float, *, counts: bool = True) -> Iterator[Action]:
        """Any rank's end is the group's: what it had in flight waits again, at its old place.

        It `counts` against the model and its requests unless their server was what went."""
        model, starting = self.models[group.model], group.phase is GroupPhase.STARTING
        requests = list(group.in_flight)
        group.in_flight.clear()
        yield from self._close(group, now)
        for request in requests:
            yield from self._again(request, group, reason, now, counts=counts)
        if starting:
            model.failed(reason, now, self.settings, counts=counts)
            self.timers.add(model.retry_at, RETRY, model.spec.name)
            if counts and model.failures > self.settings.retries:
                for request in list(model.waiting):
                    self._forget(request)
                    yield Refuse(request, 503, f"model {group.model} did not start: {reason}", 1.0)
        self._touched[group.model] = None

    def _again(
        self, request: str, group: Group, reason: str, now: float, *, counts: bool
    ) -> Iterator[Action]:
        name, since, at = self._requests[request]
        target = self._consolidation.moving.pop(request, None)
        if at != group.name:
            # It was only on its way here: the group it is in has it still.
            return
        if target in self.groups:
            yield from self._left(self.groups[target], request, now)
        self._tries[request] = self._tries.get(request, 0) + counts
        if self._tries[request] > self.settings.retries or self.models[name].retired:
            self._forget(request)
            yield Refuse(request, 503, f"model {name} was lost {self._tries.get(request, 1)} times: {reason}")
            return
        self._wait(request, self.models[name], since, now, again=True)

    # Servers and models.

    def _rebuilt(self, ranks: tuple[events.FoundRank, ...], now: float) -> Iterator[Action]:
        """Groups as they are; what belongs to no model, or to a group that is no longer whole, stops."""
        by_group: dict[str, list[events.FoundRank]] = {}
        for found in ranks:
            by_group.setdefault(found.launch.group, []).append(found)
        # Engines beside ranks first: their pipelines are not consolidated a second time.
        for name, parts in sorted(by_group.items(), key=lambda one: not one[0].endswith(WHOLE)):
            model = self.models.get(parts[0].launch.model)
            group = (
                None if model is None or name in self.groups else self.roster.adopt(parts, model.spec, now)
            )
            if model is None or group is None:
                yield from (events.Stop(part.launch.worker) for part in parts if not part.stopping)
                continue
            self.groups[name] = model.groups[name] = group
            model.number = max(model.number, int(name.rpartition("#")[2].partition(".")[0]))
            yield from self._up(group, now)
        for group in list(self.groups.values()):
            singles = (self.groups.get(worker.name + WHOLE) for worker in group.workers)
            if any(single is not None and single.phase is GroupPhase.SERVING for single in singles):
                yield from self._leave(group, now)
        for model in self.models.values():
            self._touched[model.spec.name] = None

    def _lost(self, server: str, now: float) -> Iterator[Action]:
        if server not in self.roster.cluster.servers:
            return
        for worker in self.roster.lose(server):
            for name in list(worker.groups):
                if name in self.groups:
                    reason = f"server {server} is gone"
                    yield from self._failed(self.groups[name], reason, now, counts=False)
        self._freed = True

    def _drained(self, server: str, now: float) -> Iterator[Action]:
        if server not in self.roster.cluster.servers:
            return
        self.roster.cluster.servers[server].draining = True
        for group in list(self.groups.values()):
            if any(worker.server == server for worker in group.workers) and group.phase is GroupPhase.SERVING:
                yield from self._leave(group, now)

    def _leave(self, group: Group, now: float) -> Iterator[Action]:
        """It takes nothing new, and goes when it has nothing left."""
        group.phase = GroupPhase.LEAVING
        self._idle.pop(group.name, None)
        if not group.in_flight:
            yield from self._close(group, now)

    def _deployed(self, spec: FleetModel) -> None:
        known = self.models.get(spec.name)
        if known is None:
            self.models[spec.name] = Deployment(spec, Window(self.settings.window_s))
        else:
            known.spec, known.retired = spec, False
        self._touched[spec.name] = None

    def _removed(self, name: str, now: float) -> Iterator[Action]:
        model = self.models.get(name)
        if model is None:
            return
        model.retired = True
        model.failed_on.clear()
        self._blocked.pop(name, None)
        for request in list(model.waiting):
            self._forget(request)
            yield Refuse(request, 404, f"model {name} is not deployed")
        for group in list(model.groups.values()):
            yield from self._leave(group, now)
