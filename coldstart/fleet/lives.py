"""Life cycle of groups and their workers from launch to end. Each method yields the actions that follow from one event.

A pipeline is consolidated into single workers with the full model (ParaServe, section 6): one worker when scaling down, or
as many as the load requires and the memory allows when scaling up. The switch happens when all of these workers are ready.
Streams that cannot be moved end in the pipeline, which stops after its last stream. If one of these workers exits before the
switch, the others replace the pipeline. If none is left, the pipeline keeps serving.

The streams of a drained server migrate in the same way to other workers, each once, as soon as one accepts it.
"""

from __future__ import annotations

from collections.abc import Iterator

from coldstart.fleet import events
from coldstart.fleet.events import Action, LaunchRank, MoveStream, RejectRequest
from coldstart.fleet.groups import Deployment, Group, GroupPhase, GroupWorker, ModelAgenda
from coldstart.fleet.roster import Roster
from coldstart.fleet.specification import FleetModel, FleetSettings

IDLE, RETRY = "idle", "retry"


class GroupLifecycle:
    """Manager of the life cycle of all groups of a fleet."""

    def __init__(
        self, settings: FleetSettings, models: dict[str, Deployment], roster: Roster, agenda: ModelAgenda
    ) -> None:
        self.settings, self.models, self.roster, self.agenda = settings, models, roster, agenda
        self.groups: dict[str, Group] = {}
        self.idle: dict[str, Group] = {}
        """Idle groups, with the longest-idle group first."""

    def add(self, group: Group) -> None:
        """Add a group that was launched or adopted."""
        self.groups[group.name] = self.models[group.model].groups[group.name] = group

    def assign(self, request: str, group: Group) -> None:
        """Assign a request to a group."""
        group.in_flight[request] = None
        self.idle.pop(group.name, None)

    def drop_request(self, group: Group, request: str, now: float) -> Iterator[Action]:
        """Remove a request from a group.

        If the group then has no requests, it becomes idle, or stops if it accepts no new requests.
        """
        group.in_flight.pop(request, None)
        group.streams_to_move.pop(request, None)
        self.agenda.touch(group.model)
        if group.in_flight:
            return
        group.since = now
        if group.phase is GroupPhase.LEAVING:
            yield from self._remove_group(group, now)
        else:
            self._await_idle_end(group, now)

    def _await_idle_end(self, group: Group, now: float) -> None:
        self.idle.pop(group.name, None)
        if group.idle:
            self.idle[group.name] = group
            self.agenda.add_timer(now + self.models[group.model].spec.idle_s, IDLE, group.name)

    def _remove_group(self, group: Group, now: float) -> Iterator[Action]:
        self.groups.pop(group.name, None)
        self.idle.pop(group.name, None)
        self.models[group.model].groups.pop(group.name, None)
        self.agenda.free()
        yield from self.roster.stop(group, now)

    def keeps_more(self, group: Group, spec: FleetModel) -> bool:
        """Keep one more worker of a starting pipeline after consolidation.

        Return whether the pipeline had another worker to keep. If all of its full workers are already kept, the memory of
        another worker is increased if its device has enough.
        """
        if len(group.workers) < 2 or group.phase is not GroupPhase.STARTING:
            return False
        memory = spec.full_memory(len(group.workers))
        full = [worker for worker in group.workers if worker.full]
        if len(full) <= group.keep and not any(
            self.roster.grow_worker(worker, memory) for worker in group.workers if not worker.full
        ):
            return False
        group.keep += 1
        return True

    def begin_serving(self, group: Group, now: float) -> Iterator[Action]:
        """Start to serve requests with a group if it is ready. A group that replaces a pipeline starts serving in `_switch`."""
        if group.phase is not GroupPhase.STARTING or not group.ready:
            return
        if group.replaces:
            yield from self._switch(self.groups[group.replaces], now)
            return
        model = self.models[group.model]
        model.failures, group.phase, group.since = 0, GroupPhase.SERVING, now
        for worker in group.workers:
            model.avoided_until.pop(worker.server, None)
        self.agenda.touch(group.model)
        self._await_idle_end(group, now)
        if model.list_replacements(group):
            yield from self._switch(group, now)
        elif self.settings.consolidate and len(group.workers) > 1:
            yield from self._launch_full_workers(group, model, now)

    def _launch_full_workers(self, group: Group, model: Deployment, now: float) -> Iterator[LaunchRank]:
        """Launch as many workers with the full model as the load requires, on the devices of a ready pipeline."""
        # A later deployment may need more memory than the group reserved.
        memory = model.spec.full_memory(len(group.workers))
        full = [one for one in group.workers if one.full and self.roster.grow_worker(one, memory)]
        group.keep = max(1, min(len(full), group.keep + model.count_workers_to_start(now)))
        for rank in full[: group.keep]:
            single, order = self.roster.launch_beside(rank, model, now)
            self.add(single)
            yield order

    def _switch(self, pipeline: Group, now: float) -> Iterator[Action]:
        """Replace a pipeline once all its replacements are ready, and migrate each stream to the least busy of them."""
        model = self.models[pipeline.model]
        singles = model.list_replacements(pipeline)
        if pipeline.phase is not GroupPhase.SERVING or not all(single.ready for single in singles):
            return
        pipeline.phase = GroupPhase.LEAVING
        for single in singles:
            single.phase, single.keep, single.since = GroupPhase.SERVING, 1, now
        for request in pipeline.in_flight:
            target = min(singles, key=lambda single: len(single.in_flight))
            yield self._move_stream(request, pipeline, target)
        for single in singles:
            self._await_idle_end(single, now)
        if not pipeline.in_flight:
            yield from self._remove_group(pipeline, now)
        self.agenda.touch(pipeline.model)

    def _move_stream(self, request: str, source: Group, target: Group) -> MoveStream:
        self.assign(request, target)
        self.agenda.open[request].move_target = target.name
        return MoveStream(request, source.name, target.name)

    def move_drained_streams(self, model: Deployment, now: float) -> Iterator[MoveStream]:
        """Migrate the streams of drained groups to the single workers that can accept them now.

        A pipeline is never a target, because it migrates its own streams when it is replaced.
        """
        streams = [(one, source) for source in model.groups.values() for one in source.streams_to_move]
        targets = (group for group in model.find_open_groups(now) if len(group.workers) == 1)
        slots = (group for group in targets for _ in range(group.spare))
        for (request, source), target in zip(streams, slots, strict=False):
            del source.streams_to_move[request]
            yield self._move_stream(request, source, target)

    def end_move(self, request: str, done: bool, now: float) -> Iterator[Action]:
        known = self.agenda.open.get(request)
        if known is None or known.move_target is None:
            return
        left = known.move_target
        if done:
            left, known.group = known.group or "", known.move_target
        known.move_target = None
        if left in self.groups:
            yield from self.drop_request(self.groups[left], request, now)

    def end_worker(self, worker: GroupWorker, reason: str, now: float, *, own: bool) -> Iterator[Action]:
        self.roster.remove_worker(worker, now)
        self.agenda.free()
        group = self.groups.get(worker.launch.group)
        if worker.stopping or group is None:
            return
        if own and group.phase is GroupPhase.STARTING and not group.replaces:
            until = now + self.settings.backoff_max_s
            self.models[group.model].avoided_until[worker.server] = until
        yield from self.fail(group, f"{worker.name}: {reason}", now, counts=own)

    def fail(self, group: Group, reason: str, now: float, *, counts: bool = True) -> Iterator[Action]:
        """End a group because one of its workers ended. Its requests return to the queue in their original positions.

        If `counts` is set, the failure counts against the model and the requests. It is not set if a server was lost.
        """
        model, starting = self.models[group.model], group.phase is GroupPhase.STARTING
        requests = list(group.in_flight)
        group.in_flight.clear()
        yield from self._remove_group(group, now)
        if starting and group.replaces:
            yield from self._keep_fewer(group.replaces, now)
            return
        yield from self._stop_replacing(group, now)
        for request in requests:
            yield from self._again(request, group, reason, now, counts=counts)
        if starting:
            if counts and len(group.workers) > 1:
                # The cause may be the pipeline: a machine without its bundle, or ranks that cannot connect.
                model.failed_ranks[len(group.workers)] = now + self.settings.backoff_max_s, reason
            model.failed(reason, now, self.settings, counts=counts)
            self.agenda.add_timer(model.retry_at, RETRY, model.spec.name)
            if counts and model.failures > self.settings.retries:
                for drained in model.groups.values():
                    drained.streams_to_move.clear()
                for request in list(model.waiting):
                    self.agenda.remove_request(request)
                    yield RejectRequest(request, 503, f"model {group.model} did not start: {reason}", 1.0)
        self.agenda.touch(group.model)

    def _keep_fewer(self, pipeline: str, now: float) -> Iterator[Action]:
        """Continue after a replacement of a pipeline exited. If no replacement is left, the pipeline keeps serving."""
        group = self.groups.get(pipeline)
        if group is None or group.phase is GroupPhase.LEAVING:
            return
        model = self.models[group.model]
        left = len(model.list_replacements(group))
        group.keep = max(1, left)
        self.agenda.touch(group.model)
        if left:
            yield from self._switch(group, now)

    def _stop_replacing(self, pipeline: Group, now: float) -> Iterator[Action]:
        """Stop the starting replacements of a pipeline that ended before the switch."""
        for single in self.models[pipeline.model].list_replacements(pipeline):
            if single.phase is GroupPhase.STARTING:
                yield from self._remove_group(single, now)

    def _again(
        self, request: str, group: Group, reason: str, now: float, *, counts: bool
    ) -> Iterator[Action]:
        known = self.agenda.open[request]
        target, known.move_target = known.move_target, None
        if known.group != group.name:
            # It was only being moved here, and its current group still has it.
            return
        if target in self.groups:
            yield from self.drop_request(self.groups[target], request, now)
        known.failed_tries += counts
        if known.failed_tries > self.settings.retries or self.models[known.model].retired:
            self.agenda.remove_request(request)
            yield RejectRequest(
                request, 503, f"no worker of model {known.model} completed the request: {reason}"
            )
        else:
            self.agenda.requeue_request(request, now)

    def end_request(self, request: str, now: float) -> Iterator[Action]:
        """Remove a request that has ended from its group."""
        known = self.agenda.remove_request(request)
        self.agenda.touch(known.model)
        for group in (known.group, known.move_target):
            if group in self.groups:
                yield from self.drop_request(self.groups[group], request, now)

    def rebuild(
        self, ranks: tuple[events.FoundRank, ...], drained: tuple[str, ...], now: float
    ) -> Iterator[Action]:
        """Adopt the groups of ranks that are still running.

        Stop ranks of unknown models, of incomplete groups, and of groups on the servers in `drained`.
        """
        by_group: dict[str, list[events.FoundRank]] = {}
        for found in ranks:
            by_group.setdefault(found.launch.group, []).append(found)
        replaced = {found.launch.beside for found in ranks}
        adopted: list[Group] = []
        # Adopt pipelines before the groups that replace them.
        for name, parts in sorted(by_group.items(), key=lambda one: one[1][0].launch.beside):
            first = parts[0].launch
            model = self.models.get(first.model)
            group = None
            if model is not None and name not in self.groups:
                model.number = max(model.number, first.number)
                group = self.roster.adopt(parts, model.spec, replaced, now)
            if group is None:
                yield from (events.StopWorker(part.launch.worker) for part in parts if not part.stopping)
                continue
            rank = self.roster.workers.get(first.beside)
            if rank is not None and rank.launch.group in self.groups:
                group.replaces, group.keep = rank.launch.group, 0
            self.add(group)
            adopted.append(group)
        for server in drained:
            yield from self.drain_server(server, frozenset(), now)
        for group in adopted:
            if group.name in self.groups:
                yield from self.begin_serving(group, now)
        for model in self.models.values():
            self.agenda.touch(model.spec.name)

    def lose_server(self, server: str, now: float) -> Iterator[Action]:
        if server not in self.roster.servers:
            return
        for worker in self.roster.lose(server):
            if (group := self.groups.get(worker.launch.group)) is not None:
                yield from self.fail(group, f"server {server} has left the fleet", now, counts=False)
        self.agenda.free()

    def drain_server(self, server: str, streams: frozenset[str], now: float) -> Iterator[Action]:
        """Stop each group of a server after its last request, and mark its requests that are in `streams` for migration."""
        if server not in self.roster.servers:
            return
        self.roster.drain(server)
        for group in list(self.groups.values()):
            drained = any(worker.server == server for worker in group.workers)
            if not drained or group.phase is GroupPhase.LEAVING:
                continue
            yield from self.stop(group, now)
            # A request that is being migrated to this group still belongs to another one.
            own = (one for one in group.in_flight if self.agenda.open[one].group == group.name)
            group.streams_to_move = dict.fromkeys(one for one in own if one in streams)
            self.agenda.touch(group.model)

    def stop(self, group: Group, now: float) -> Iterator[Action]:
        """Dispatch no more requests to a group, and stop it after its last request has ended."""
        yield from self._stop_replacing(group, now)
        group.phase = GroupPhase.LEAVING
        group.streams_to_move.clear()
        if not group.in_flight:
            yield from self._remove_group(group, now)

    def stop_idle(self, group: Group, now: float) -> Iterator[Action]:
        """Stop a group that has been idle for `idle_s` seconds, unless its model needs it for its minimum number of workers."""
        model = self.models[group.model]
        if not group.idle or now < group.since + model.spec.idle_s:
            return
        if model.has_minimum_without(group):
            yield from self.stop(group, now)
        else:
            self.agenda.add_timer(now + max(1.0, model.spec.idle_s), IDLE, group.name)
